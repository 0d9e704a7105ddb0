"""What verbs ask of a source first: its steps, and which one is meant."""

from __future__ import annotations

from collections.abc import Iterator

from checkfreq.errors import NoCheckpointError
from checkfreq.persist.handover import ranks_in, status
from checkfreq.persist.listing import best_in
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore
from checkfreq.types import size_text

LINKED = "a symbolic link: no checkpoint, not followed"


def steps_of(source: CheckpointSource) -> list[int]:
    """Committed steps, ascending; NoCheckpointError if there is none, or no directory."""
    require_directory(source)
    steps = source.steps()
    if not steps:
        names = (source.where(step).rpartition("/")[2] for step in source.links())
        but = "".join(f"; {name}: {LINKED}" for name in names)
        raise NoCheckpointError(f"{source.name} holds no checkpoint{but}")
    return steps


def require_directory(source: CheckpointSource) -> None:
    """NoCheckpointError unless the directory exists."""
    if isinstance(source, CheckpointStore) and not source.ops.is_dir(source.root):
        raise NoCheckpointError(f"{source.root} is not a directory")


def resolved(source: CheckpointSource, step: int | str | None) -> int:
    """The step that an argument of type `STEP` means: None is the newest, "best:METRIC" the best.

    Whether there is a checkpoint of a step that was given as a number is not checked.
    """
    steps = steps_of(source)
    if step is None:
        return steps[-1]
    return step if isinstance(step, int) else best_in(source, step)


def in_memory(source: CheckpointSource) -> Iterator[str]:
    """Lines on what workers that lingered after a killed run keep for the next one."""
    if not isinstance(source, CheckpointStore):
        return
    for rank in ranks_in(source.root):
        held = status(source.root, rank)
        if held is not None:
            yield (
                f"rank {rank} in memory: step {held.step} ({held.stage.value}), "
                f"{size_text(held.num_bytes)}, for {held.left_s:.0f} s more (process {held.pid})"
            )
