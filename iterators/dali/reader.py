"""``FileReader``: a resumable replacement for ``fn.readers.file`` in a DALI pipeline.

It chooses the paths, in our order, and leaves reading them to ``fn.io.file.read`` in DALI's
threads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from iterators.dali.files import FileList, StrPath
from iterators.dali.imports import Pipeline, fn
from iterators.dali.source import OUTPUTS, IndexedSource, SourceSpec
from iterators.order.batch_requests import Share
from iterators.order.environment import rank_and_world
from iterators.order.fingerprint import dataset_fingerprint
from iterators.order.seeds import default_seed

#: Batches that are in none of DALI's queues: one ready in the iterator, one being made.
_SPARE = 2

logger = logging.getLogger(__name__)


class FileReader:
    """A reader of files in our order, with labels and what an augmentation needs.

    Use it as an operator object, in ``define_graph`` or under ``@pipeline_def``::

        reader = FileReader(file_root=folder, shard_id=rank, num_shards=world)

        @pipeline_def(batch_size=64, num_threads=4, device_id=0)
        def pipeline():
            encoded, label = reader(name="Reader")
            images = fn.decoders.image(encoded, device="mixed")
            return fn.resize(images, size=[224, 224]), label

    The files are those that ``fn.readers.file`` would find: class folders below ``file_root``, the
    "path label" lines of ``file_list``, or ``files`` (with ``labels``). A position still fits if
    the folder was moved: files are named relative to ``file_root``, or else to the folder of the
    list, or to the folder that contains all ``files``.

    Calling the reader in a pipeline definition returns one DALI node for the encoded bytes and one
    for each of ``outputs``, by default the label and, with ``num_uniforms=K``, the uniforms:

    - "label", ``[1] int32``;
    - "id", ``[1] int64``, the index of the file;
    - "weight", ``[1] float32``, 1, or 0 for a pad (see ``CFIterator.last_weights``);
    - "uniforms", ``[K] float32`` in [0, 1), from (seed, epoch, id, k) alone. Augmentation that
      uses them is the same after a resume and at any layout.

    DALI's own random numbers do not resume exactly, and neither do those of Python operators. A
    pipeline that draws such numbers, or runs Python code that may, is refused unless
    ``native_random=True``.

    Arguments
        seed: default: the seed of the ``CFIterator``, else torch's initial seed; rank 0's on all
            ranks.
        shard_id, num_shards: default: rank and world size of the process group.
        tail: "short" or "drop", see ``ResumableDataLoader``.
        resume_index, resume_epoch: where a run without a restored position starts: after
            ``resume_index`` samples of each shard in epoch ``resume_epoch``.
        cf_det: accepted for old scripts; the order is always deterministic.
        fingerprint: a name for the data, instead of a digest of the file list.
    """

    def __init__(
        self,
        *,
        file_root: StrPath | None = None,
        files: Sequence[StrPath] | None = None,
        labels: Sequence[int] | None = None,
        file_list: StrPath | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        shard_id: int | None = None,
        num_shards: int | None = None,
        tail: str = "short",
        num_uniforms: int = 0,
        outputs: Sequence[str] | None = None,
        native_random: bool = False,
        resume_index: int = 0,
        resume_epoch: int = 0,
        cf_det: bool = True,
        fingerprint: str | None = None,
    ) -> None:
        if seed is not None and not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must lie in [0, 2**64), got {seed}")
        if tail not in ("short", "drop"):
            raise ValueError(f"tail must be 'short' or 'drop', got {tail!r}")
        if resume_index < 0 or resume_epoch < 0:
            raise ValueError(
                f"resume_index and resume_epoch are counts, got {resume_index} and {resume_epoch}"
            )
        if not cf_det:
            logger.info("cf_det=False has no effect: the order is always deterministic")
        if num_uniforms < 0:
            raise ValueError(f"num_uniforms is a count, got {num_uniforms}")
        self._rank, self._world = rank_and_world(shard_id, num_shards)
        self._tail, self._seed = tail, seed
        self._default_seed = 0
        if seed is None:
            self._default_seed = default_seed(rank=self._rank, world=self._world)
        found = _found(file_root, files, labels, file_list)
        self._spec = SourceSpec(
            found,
            dataset_fingerprint(found) if fingerprint is None else fingerprint,
            shuffle,
            num_uniforms,
            _outputs(outputs, num_uniforms),
            native_random,
        )
        self._origin = (resume_epoch, min(resume_index * self._world, len(found)))

    @property
    def files(self) -> FileList:
        """The files; ``files.name(id)`` is the path of a sample."""
        return self._spec.files

    @property
    def fingerprint(self) -> str:
        """Identifies the data; saved with a position."""
        return self._spec.fingerprint

    def __len__(self) -> int:
        """Number of samples over all shards."""
        return len(self._spec.files)

    def __call__(self, *, name: str | None = None) -> tuple[Any, ...]:
        """The nodes in the pipeline being defined. ``name`` is given to the file operator."""
        pipeline = Pipeline.current()
        if pipeline is None:
            raise RuntimeError("call FileReader inside a pipeline definition: there is none here")
        share = Share(pipeline.max_batch_size, self._world, self._rank, self._tail)
        if not share.batches(len(self)):
            raise ValueError(
                f"tail='drop' would serve nothing: {len(self)} files make no whole batch of "
                f"{share.global_batch}"
            )
        source = IndexedSource(
            self._spec,
            share,
            seed=self._seed,
            default_seed=self._default_seed,
            origin=self._origin,
            remembered=_deepest(pipeline) + _SPARE,
        )
        paths, *others = fn.external_source(
            source=source, num_outputs=1 + len(self._spec.outputs), batch=True, batch_info=True
        )
        return fn.io.file.read(paths, name=name), *others


def _deepest(pipeline: Any) -> int:
    """Largest number of batches in the pipeline's queues."""
    depth = pipeline.prefetch_queue_depth
    return sum(depth.values()) if isinstance(depth, dict) else int(depth)


def _outputs(asked: Sequence[str] | None, num_uniforms: int) -> tuple[str, ...]:
    if asked is None:
        return ("label", "uniforms") if num_uniforms else ("label",)
    if isinstance(asked, str) or not set(asked) <= set(OUTPUTS) or len(set(asked)) < len(asked):
        raise ValueError(f"outputs must be distinct names from {OUTPUTS}, got {asked!r}")
    if ("uniforms" in asked) != bool(num_uniforms):
        raise ValueError(f"outputs {tuple(asked)} do not go with num_uniforms={num_uniforms}")
    return tuple(asked)


def _found(
    root: StrPath | None,
    files: Sequence[StrPath] | None,
    labels: Sequence[int] | None,
    file_list: StrPath | None,
) -> FileList:
    if labels is not None and files is None:
        raise ValueError("labels belong to files: give files too")
    if files is not None and file_list is not None:
        raise ValueError("give files or file_list, not both")
    if files is not None:
        return FileList.of_files(files, labels, root)
    if file_list is not None:
        return FileList.of_list(file_list, root)
    if root is not None:
        return FileList.of_folder(root)
    raise ValueError("a reader needs file_root, file_list or files")
