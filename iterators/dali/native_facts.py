"""Reads the properties of a built DALI iterator, and refuses one that cannot resume exactly.

Uses private attributes of DALI 2.4, as ``operators`` does, and does not import DALI. The facts are
read once, before anything is delivered.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from iterators.dali.files import absolute, entries_of_folder, lines_of_list, rooted
from iterators.dali.operators import kind, runs_python, schema, sole_pipeline
from iterators.errors import NotResumableError
from iterators.order.fingerprint import listing_digest

logger = logging.getLogger(__name__)

#: Reader arguments that do not change the order of the samples: where the data is (in the
#: fingerprint instead), which part of it this process reads (compared by number), how it is read.
_NOT_SETTINGS = {
    *("file_root", "files", "labels", "file_list", "path", "paths", "index_path", "index_paths"),
    *("shard_id", "num_shards", "seed", "name", "preserve", "device"),
    *("prefetch_queue_depth", "dont_use_mmap", "use_o_direct", "read_ahead", "lazy_init"),
    *("tensor_init_bytes", "bytes_per_sample_hint", "cache_header_information"),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """One shard of one reader. ``operators`` and ``settings`` must agree when a state is restored.

    ``num_batches`` is the same on every shard, since padding makes them equal.
    """

    reader: str
    epoch_size: int
    shard: int
    shards: int
    batch: int
    num_batches: int
    operators: str
    settings: str

    def place(self, batches: int) -> int:
        """Number of samples, over all shards, in the first ``batches`` batches of an epoch."""
        return min(batches * self.batch * self.shards, self.epoch_size)

    def batches(self, place: int) -> int:
        """The inverse of ``place``, which exists because no batch is empty on every shard."""
        return -(-place // (self.batch * self.shards))

    @property
    def has_empty_tail(self) -> bool:
        """Whether the last batch of an epoch is empty on some shard."""
        return self.epoch_size // self.shards <= (self.num_batches - 1) * self.batch


def is_dali_iterator(loader: object) -> bool:
    """Whether ``loader`` is an iterator of a DALI plugin. Does not import DALI."""
    base = sys.modules.get("nvidia.dali.plugin.base_iterator")
    return base is not None and isinstance(loader, base._DaliBaseIterator)


def read_facts(iterator: Any) -> Facts:
    """Read ``iterator``; ``NotResumableError`` says what is missing and what to write instead."""
    if not is_dali_iterator(iterator):
        raise NotResumableError(
            f"make(checkpoint) must return a DALI iterator (DALIGenericIterator or "
            f"DALIClassificationIterator of nvidia.dali.plugin.pytorch), got "
            f"{type(iterator).__name__}"
        )
    pipeline = _checkpointing_pipeline(iterator)
    name, meta = _only_reader(iterator, pipeline)
    _require_exactly_once(iterator, name, meta)
    _require_known_sources(pipeline)
    facts = Facts(
        reader=name,
        epoch_size=int(meta["epoch_size"]),
        shard=int(meta["shard_id"]),
        shards=int(meta["number_of_shards"]),
        batch=int(iterator.batch_size),
        num_batches=len(iterator),
        operators=" ".join(kind(op) for op in pipeline._ops),
        settings=_settings_text(_reader_op(pipeline, name)),
    )
    _require_dense(iterator, facts)
    return facts


def _checkpointing_pipeline(iterator: Any) -> Any:
    pipeline = sole_pipeline(iterator)
    if not pipeline._enable_checkpointing:
        raise NotResumableError(
            "the pipeline does not keep its state: build it with enable_checkpointing=True (and "
            "checkpoint=checkpoint, the argument of make)"
        )
    if not pipeline._ops:
        raise NotResumableError(
            "the pipeline was deserialized, so its operators cannot be inspected: build it from "
            "its definition"
        )
    return pipeline


def _only_reader(iterator: Any, pipeline: Any) -> tuple[str, Mapping[str, Any]]:
    readers = pipeline.reader_meta()
    if len(readers) != 1:
        raise NotResumableError(
            "expected one reader that knows its epoch size, found "
            f"{len(readers)} ({', '.join(sorted(readers)) or 'none'}): several readers advance "
            "separately, and without one the length of an epoch is unknown"
        )
    ((name, meta),) = readers.items()
    if iterator._reader_name != name:
        raise NotResumableError(
            f"the iterator was built with reader_name={iterator._reader_name!r}; give it "
            f"reader_name={name!r} (and no size=), so that it ends epochs where the reader does"
        )
    if meta["epoch_size"] < 1:
        raise NotResumableError(f"reader {name!r} does not know how many samples an epoch has")
    return name, meta


def _require_exactly_once(iterator: Any, name: str, meta: Mapping[str, Any]) -> None:
    policy = iterator._last_batch_policy.name
    if policy != "PARTIAL":
        raise NotResumableError(
            f"last_batch_policy is {policy}, which loses or repeats samples at each epoch's end: "
            "build the iterator with last_batch_policy=LastBatchPolicy.PARTIAL"
        )
    if not meta["pad_last_batch"]:
        raise NotResumableError(
            f"reader {name!r} has pad_last_batch=False, which loses the samples that its last "
            "batch takes from the next epoch: give it pad_last_batch=True"
        )


def _require_known_sources(pipeline: Any) -> None:
    """DALI does not save the state of Python code: only a callable that gets the index resumes."""
    for op in pipeline._ops:
        if kind(op) == "ExternalSource":
            _require_indexed(op)
        if runs_python(op):
            logger.warning(
                "the pipeline calls a Python function (%s): any state that it keeps is not saved",
                op.name,
            )


def _require_indexed(op: Any) -> None:
    source = getattr(getattr(op, "_group", None), "source_desc", None)
    if source is None or source.kind.name != "CALLABLE" or not source.has_inputs:
        taken_from = "feed_input" if source is None else source.kind.name.lower()
        raise NotResumableError(
            f"external_source {op.name!r} takes its data from {taken_from}, which starts from the "
            "beginning after a resume: give it a callable with one argument (the batch index, or "
            "BatchInfo)"
        )


def _require_dense(iterator: Any, facts: Facts) -> None:
    """An empty batch is replaced by a pad of weight 0, which needs a plain tensor per output."""
    classes = {one.__name__ for one in type(iterator).__mro__}
    if facts.has_empty_tail and "DALIGenericIterator" not in classes:
        raise NotResumableError(
            f"{facts.epoch_size} samples on {facts.shards} shards in batches of {facts.batch} "
            f"leave some shard an empty last batch, which {type(iterator).__name__} cannot pad: "
            "use DALIGenericIterator, or a different batch size"
        )


def require_at(iterator: Any, batches: int) -> None:
    """Refuse a pipeline that has not served exactly ``batches`` batches."""
    prefetched = 0 if getattr(iterator, "_first_batch", None) is None else 1
    served = iterator._pipes[0]._consumer_iter - prefetched
    if served != batches:
        raise NotResumableError(
            f"the pipeline that make(checkpoint) built has served {served} batches, not {batches}: "
            "build a new one in each call, and do not run it elsewhere"
        )


def note_shuffling(iterator: Any, facts: Facts) -> None:
    """Log settings that are not wrong but may surprise."""
    pipeline = iterator._pipes[0]
    settings = _arguments(_reader_op(pipeline, facts.reader))
    if settings.get("shuffle_after_epoch") and settings.get("shuffle_after_epoch_seed") is None:
        logger.info(
            "reader %r shuffles with DALI's constant seed, so every run has the same order; set "
            "shuffle_after_epoch_seed= (equal on all ranks) for a different one",
            facts.reader,
        )
    if pipeline.seed is None:
        logger.info(
            "the pipeline has no seed=: a run that is restarted before its first checkpoint draws "
            "different random numbers"
        )


def fingerprint_of(iterator: Any, facts: Facts) -> str:
    """Identifies the reader's data: its files and labels if it lists them, else kind and size."""
    op = _reader_op(iterator._pipes[0], facts.reader)
    listing = _listing(op)
    if listing is None:
        return f"{kind(op)}:{facts.epoch_size}"
    return f"{kind(op)}:Files:{len(listing)}:{listing_digest(listing)}"


def _listing(op: Any) -> list[tuple[str, str | None]] | None:
    """The reader's files, relative to their root, with the labels that it was given.

    None if the reader does not list files.
    """
    given = _arguments(op)
    root = absolute(given["file_root"]) if given.get("file_root") else None
    labels: Iterable[Any] = repeat(None)
    if given.get("files"):
        _, names = rooted(given["files"], root)
        if given.get("labels") is not None:
            labels = map(str, given["labels"])
    elif given.get("file_list"):
        names = [line for _, line in lines_of_list(given["file_list"])]
        names = names if root is None else rooted(names, root)[1]
    elif root is not None:
        names = [name for name, _ in entries_of_folder(root, _patterns(op), loose=True)]
    elif paths := given.get("path") or given.get("paths"):
        several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        names = [os.path.basename(os.fsencode(one)) for one in several]
    else:
        return None
    return list(zip(map(os.fsdecode, names), labels, strict=False))


def _patterns(op: Any) -> list[str]:
    """The file patterns of a reader that searches a folder: given, or DALI's default."""
    given = _arguments(op)
    known = schema(op)
    for name in ("file_filters", "file_filter"):
        if given.get(name):
            found = given[name]
            return [found] if isinstance(found, str) else list(found)
        if known.HasArgument(name):
            found = ast.literal_eval(known.GetArgumentDefaultValueString(name))
            return [found] if isinstance(found, str) else list(found)
    return ["*"]


def _reader_op(pipeline: Any, name: str) -> Any:
    return next(op for op in pipeline._ops if op.name == name)


def _arguments(op: Any) -> Mapping[str, Any]:
    return {**op._op._init_args, **op._op._call_args}


def _settings_text(op: Any) -> str:
    """The arguments that determine the samples and their order, as text."""
    chosen = {
        name: value
        for name, value in _arguments(op).items()
        if name not in _NOT_SETTINGS and not name.startswith("_") and value is not None
    }
    return " ".join(f"{name}={chosen[name]!r}" for name in sorted(chosen))
