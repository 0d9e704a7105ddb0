"""Which checkpoints may not be removed yet, because an agent that copies files may need them.

The agent (of managed spot training) copies new files within some time, and mirrors removals.
Checkpoints that retention removes sooner would never be copied whole. So two are held back: the
newest that was there for that time, which the agent therefore has, and the oldest of the younger
ones, until it was. Lost with the machine is then at most twice that time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def held_back(ages_s: Mapping[int, float], *, found: Collection[int], within_s: float) -> set[int]:
    """The steps to keep, of those with these ages in seconds since they were committed or found.

    ``found`` were there when the run began: it is not known for how long, so each is held back.
    """
    copied = [step for step, age_s in ages_s.items() if age_s >= within_s]
    young = ages_s.keys() - set(copied)
    held = young.intersection(found)
    return held | set(sorted(copied)[-1:]) | set(sorted(young - held)[:1])
