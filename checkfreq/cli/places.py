"""Which two checkpoints the words after ``checkfreq diff`` name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkfreq.cli.arguments import step_number
from checkfreq.cli.checkpoints import resolved, steps_of
from checkfreq.errors import ConfigError
from checkfreq.mirror.settings import is_url
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore

_NAMED = re.compile(r"step-[0-9]{8,18}")


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint in a directory, or in a mirror."""

    store: CheckpointSource
    step: int

    @property
    def name(self) -> str:
        """``step 100 of /home/you/chk``."""
        return f"step {self.step} of {self.store.name}"


def two_places(words: Sequence[str]) -> tuple[Place, Place]:
    """The checkpoints that the words mean; ConfigError if they mean no two.

    ::

        chk/                    the newest two steps
        chk/ 100                that step and the newest
        chk/ 100 200            two steps
        a/ b/                   the newest step of each
        a/ b/ 100               that step of each
        a/ b/ 100 200           a step of each
        chk/ s3://bucket/run    the newest step of each, one of them in a mirror
        chk/step-00000100 chk/step-00000200
    """
    folders: list[tuple[str, int | None]] = []
    steps: list[int | str | None] = []
    for word in words:
        folder, step = _split(word)
        if _is_number(word) or (step is not None and not folder and folders):
            steps.append(_step(word))
        else:
            folders.append((folder or ".", step))
    if len(folders) == 1:
        folder, own = folders[0]
        return _of_one(folder, steps if own is None else [own, *steps], words)
    num_open = [own for _, own in folders].count(None)
    if len(folders) != 2 or len(steps) not in {0, min(1, num_open), num_open}:
        raise _unclear(words)
    given = iter(2 * steps if len(steps) == 1 else steps or (None, None))
    first, second = (_place(name, next(given) if own is None else own) for name, own in folders)
    return first, second


def _of_one(
    folder: str, steps: Sequence[int | str | None], words: Sequence[str]
) -> tuple[Place, Place]:
    if len(steps) > 2:
        raise _unclear(words)
    if steps:
        return _place(folder, steps[0]), _place(folder, steps[1] if len(steps) > 1 else None)
    store = _store(folder)
    found = steps_of(store)
    if len(found) < 2:
        raise ConfigError(f"{folder}: expected two steps to compare, found step {found[0]} alone")
    return Place(store, found[-2]), Place(store, found[-1])


def _unclear(words: Sequence[str]) -> ConfigError:
    return ConfigError(
        "expected two steps of a directory (chk/ 100 200) or two directories or URLs (a/ b/), "
        f"found {' '.join(words)}"
    )


def _place(directory: str, step: int | str | None) -> Place:
    store = _store(directory)
    number = resolved(store, step)
    store.require(number)
    return Place(store, number)


def _store(directory: str) -> CheckpointSource:
    if is_url(directory):
        from checkfreq.mirror.reader import MirrorReader
        from checkfreq.mirror.settings import Mirror

        return MirrorReader(Mirror(directory))
    return CheckpointStore(Path(directory))


def _split(word: str) -> tuple[str, int | None]:
    """A directory, and the step if the word is a path to one; "" if it is a step's name alone."""
    folder, slash, name = word.rstrip("/").rpartition("/")
    if _NAMED.fullmatch(name):
        return folder or slash, step_number(name)
    return word, None


def _is_number(word: str) -> bool:
    return word.startswith("best:") or (word.isascii() and word.isdigit())


def _step(word: str) -> int | str:
    if word.startswith("best:"):
        return word
    try:
        return step_number(word)
    except ValueError as error:
        raise ConfigError(f"{error}") from None
