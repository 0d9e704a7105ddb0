"""Streams of other libraries that cannot be resumed exactly, found before a run relies on them.

Hugging Face's ``datasets`` saves no shuffle buffer, some stages of ``webdataset`` take their order
from the clock, and MosaicML's ``StreamingDataset`` keeps its place in memory that processes share.
Such a stream is refused by name, with what to use instead. Seeds that a pipeline was built with
become part of the data's fingerprint, so that a run is not resumed in another order.

A library is known by the module that it has imported; none is imported here. Any process.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

from iterators.errors import NotResumableError

#: Stages of webdataset that choose shards anew in each process.
_RESAMPLING = "resampled_"


def require_exact(stream: object) -> None:
    """``NotResumableError`` if ``stream`` is of a known library, and not exact after a restore."""
    if _is_of(stream, "streaming.base.dataset", "StreamingDataset"):
        raise NotResumableError(
            f"{type(stream).__name__} keeps its place in memory that all its workers share, and "
            "fills up epochs with repeated samples, so no worker's state is exact. Its samples can "
            "be read by number: give LocalDataset(local) or a ShardedDataset over its shards to "
            "the DataLoader"
        )
    if _is_of(stream, "datasets.iterable_dataset", "IterableDataset"):
        _require_covered(stream)
    for stage in _stages(stream):
        _require_repeatable(stage)
    if (inner := _wrapped(stream)) is not None:
        require_exact(inner)


def seeds_of(stream: object) -> str:
    """The seeds that a stream of a known library was built with, to compare; mostly empty."""
    found = [seed for one in _hugging_face_parts(stream) if (seed := _generator_in(one))]
    found += [seed for stage in _stages(stream) if (seed := _seed_of(stage))]
    if (inner := _wrapped(stream)) is not None:
        found.append(seeds_of(inner))
    return "".join(f":{seed}" for seed in found if seed)


def set_epoch(stream: object, epoch: int) -> None:
    """Let the next ``iter`` use the order of ``epoch``, if the stream has one of its own."""
    if callable(own := getattr(stream, "set_epoch", None)):
        own(epoch)
    for stage in _stages(stream):
        if callable(own := getattr(stage, "set_epoch", None)):
            own(epoch)
        elif _counts_epochs(stage):
            stage.epoch = epoch - 1  # counted up at each iter


def _is_of(stream: object, module: str, name: str) -> bool:
    """Whether it is an instance of a class of a module, which then must have been imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(stream, kind)


def _wrapped(stream: object) -> object | None:
    """The stream inside one of ours."""
    return getattr(stream, "_cf_source", None)


# Hugging Face's datasets


def _hugging_face_parts(stream: object) -> Iterator[Any]:
    """What a streaming dataset is made of, from the outermost part to the sources."""
    if not _is_of(stream, "datasets.iterable_dataset", "IterableDataset"):
        return
    left = [getattr(stream, "_ex_iterable", None)]
    if left[0] is None:
        raise NotResumableError(
            "this version of datasets does not show what a streaming dataset is made of, so it "
            "might hold a shuffle buffer, which its state does not cover. Use datasets 5, or a "
            "map-style dataset"
        )
    while left:
        part = left.pop()
        yield part
        if (inner := getattr(part, "ex_iterable", None)) is not None:
            left.append(inner)
        left.extend(getattr(part, "ex_iterables", ()))


def _require_covered(stream: object) -> None:
    for part in _hugging_face_parts(stream):
        size = getattr(part, "buffer_size", 1)  # a buffer of 1 holds nothing back
        if type(part).__name__ == "BufferShuffledExamplesIterable" and size > 1:
            raise NotResumableError(
                "shuffle() of a streaming dataset keeps a buffer of samples that its state does "
                "not hold: after a restore they would be lost. Use ShuffledStream(dataset, "
                f"buffer_size={size}) instead, which restores its buffer; the order of "
                "the shards changes in each epoch without shuffle()"
            )
        formatting = getattr(part, "formatting", None)
        if formatting and formatting.is_table and getattr(part, "batched", False):
            raise NotResumableError(
                "a batched map() or filter() of a streaming dataset of tables "
                f"(with_format({formatting.format_type!r})) may skip a batch after a restore, as "
                "datasets says of its state_dict(). Use another format, or batched=False"
            )


def _generator_in(part: Any) -> str:
    generator = getattr(part, "generator", None)
    if not isinstance(generator, np.random.Generator):
        return ""
    return f"seed-{_digest(repr(generator.bit_generator.state))}"


# webdataset


def _stages(stream: object) -> Iterator[Any]:
    """The stages of a pipeline of webdataset, and of the pipelines inside it."""
    if "webdataset" not in sys.modules:
        return
    left = [stream]
    while left:
        one = left.pop()
        if _is_of(one, "webdataset.pipeline", "DataPipeline") or _is_of(
            one, "webdataset.mix", "RandomMix"
        ):
            inner = [*getattr(one, "pipeline", ()), *getattr(one, "datasets", ())]
            yield from inner
            left.extend(inner)


def _require_repeatable(stage: Any) -> None:
    if _is_of(stage, "webdataset.shardlists", "DirectoryShardList"):
        raise NotResumableError(
            "DirectoryShardList takes whatever shards lie in a folder when it looks. Give "
            "WebDataset a list of shards"
        )
    resamples = _is_of(stage, "webdataset.shardlists", "ResampledShards")
    if _name_of(stage) == _RESAMPLING or (resamples and not stage.deterministic):
        raise NotResumableError(
            "resampled shards are chosen by the clock and the process id, so a restart chooses "
            "others. Use resampled=False, or ResampledShards(urls, deterministic=True)"
        )
    shuffle = _shuffle_arguments(stage)
    if shuffle and shuffle.get("seed") is None and shuffle.get("rng") is None:
        raise NotResumableError(
            f"shuffle({shuffle['bufsize']}) without a seed takes its order from the clock and the "
            "process id, so a restart would serve other samples. Give it seed=, or use "
            "detshuffle(seed=)"
        )


def _name_of(stage: Any) -> str:
    """The name of the function that a stage of webdataset was made from."""
    if not _is_of(stage, "webdataset.filters", "FilterFunction"):
        return ""
    return getattr(stage.f, "__name__", "")


def _shuffle_arguments(stage: Any) -> dict[str, Any]:
    """The arguments of ``webdataset.shuffle``; empty for any other stage and for no shuffle."""
    if _name_of(stage) != "_shuffle":
        return {}
    bound = inspect.signature(stage.f).bind_partial(None, *stage.args, **stage.kw)
    bound.apply_defaults()
    return dict(bound.arguments) if bound.arguments["bufsize"] > 1 else {}


def _seed_of(stage: Any) -> str:
    if _is_of(stage, "webdataset.shardlists", "SimpleShardList") and stage.seed is not None:
        return f"shards({stage.seed})"
    if _counts_epochs(stage):
        return f"{type(stage).__name__}({stage.seed})"
    shuffle = _shuffle_arguments(stage)
    if not shuffle:
        return ""
    if shuffle["rng"] is not None:
        return f"shuffle({_digest(repr(shuffle['rng'].getstate()))})"
    return f"shuffle({shuffle['seed']})"


def _counts_epochs(stage: Any) -> bool:
    return _is_of(stage, "webdataset.filters", "detshuffle") or _is_of(
        stage, "webdataset.shardlists", "ResampledShards"
    )


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=6).hexdigest()
