"""What ``pin`` and ``unpin`` share."""

from __future__ import annotations

from collections.abc import Sequence

from checkfreq.cli import text
from checkfreq.cli.checkpoints import resolved
from checkfreq.cli.locking import locked
from checkfreq.store.marks import StepMark
from checkfreq.store.source import CheckpointSource


def set_pins(
    source: CheckpointSource, steps: Sequence[int | str], *, keep: bool, as_json: bool
) -> int:
    """Pin or unpin the steps, all or none, and say which were changed."""
    numbers = list(dict.fromkeys(_existing(source, step) for step in steps))
    # A run knows the pins that it found when it began and those it made: it would not see this one.
    otherwise = "A run reads pins when it begins. Do it once the run has ended"
    if keep:
        otherwise += "; or call cf_manager.save(keep=True) in it, which pins the step it is at"
    if keep and source.is_local:
        path = source.where(numbers[0])
        otherwise += (
            ". To have a step in any case, link its files: "
            f"cp -al {path} ../{path.rpartition('/')[2]}"
        )
    with locked(source, otherwise=otherwise) as target:
        numbers = list(dict.fromkeys(_existing(source, step) for step in steps))
        marks = target.marks()
        changed = [n for n in numbers if marks.get(n, StepMark()).keep is not keep]
        for step in changed:
            target.add_mark(step, keep=keep)
    for step in numbers:
        _tell(step, keep=keep, changed=step in changed, as_json=as_json)
    return 0


def _existing(store: CheckpointSource, step: int | str) -> int:
    number = resolved(store, step)
    store.require(number)
    return number


def _tell(step: int, *, keep: bool, changed: bool, as_json: bool) -> None:
    if as_json:
        record = {"step": step, "keep": keep, "changed": changed}
        print(text.json_of(record, indent=None), flush=True)
        return
    state = "pinned" if keep else "not pinned"
    print(f"step {step}: {state}{'' if changed else ' already'}", flush=True)
