"""Restores many ranks together: the newest step that is valid for all of them.

The leaders list the steps in their directories, each with its attempt: two directories may hold the
same step from different attempts, and these must not be mixed. Then every rank reads and verifies
what it needs of the newest step that all directories hold. If it is damaged for one rank, all ranks
go back to the next older one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from checkfreq.errors import CorruptCheckpointError, NoCheckpointError
from checkfreq.ranks.meetings import Meetings
from checkfreq.restore.needed_files import needed_files
from checkfreq.restore.restorer import LoadedCheckpoint, Restorer
from checkfreq.state.capture import POSITIONS
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.store.manifest import Manifest
from checkfreq.store.store import NONE_VALID, Rejected
from checkfreq.types import Json, Role

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Common:
    """The steps that every directory holds, newest first, and what the directories say besides."""

    steps: tuple[int, ...]
    damaged: Mapping[int, Mapping[int, str]]
    ever_held: bool
    is_common: bool
    text: str


class JointRestorer:
    """One rank's side of a restore. All ranks make the same calls, in the same order."""

    def __init__(
        self, restorer: Restorer, meetings: Meetings, *, chk: CFCheckpoint, role: Role
    ) -> None:
        self._restorer = restorer
        self._meetings = meetings
        self._chk = chk
        self._role = role
        self._path = str(restorer.path)

    def find(self, step: int | None) -> LoadedCheckpoint | None:
        """Read and verify ``step``, or the newest step that is valid on all ranks.

        None if no directory ever held one. Raises on all ranks NoCheckpointError (some directory
        lacks the step) and CorruptCheckpointError (it, or every step, fails validation). Any other
        error on one rank is a RankError on the others.
        """
        common = self._common()
        if step is not None and step in common.damaged:
            raise self._damaged(step, common.damaged[step]).error
        if step is not None and step not in common.steps:
            raise NoCheckpointError(f"not every rank has step {step}; they have: {common.text}")
        if not common.steps and not common.damaged and not common.ever_held:
            return None
        if not common.steps and not self._role.shares_all and not common.is_common:
            logger.warning(
                "no step was ever committed in the directories of all ranks (%s): starting over",
                common.text,
            )
            return None
        rejected: list[Rejected] = []
        candidates = common.steps if step is None else (step,)
        damaged = common.damaged if step is None else {}
        for candidate in sorted({*candidates, *damaged}, reverse=True):
            if candidate in common.damaged:
                rejected.append(self._damaged(candidate, common.damaged[candidate]))
                continue
            found = self._read_together(candidate, rejected)
            if found is not None:
                return found
        raise self._none_valid(common, rejected)

    def _common(self) -> _Common:
        reply = self._meetings.act(
            "restore(): looking for checkpoints",
            lambda: self._restorer.inventory() if self._role.leads else None,
            decide=_common,
        )
        damaged = {
            int(step): {int(rank): text for rank, text in texts.items()}
            for step, texts in reply["damaged"].items()
        }
        return _Common(
            tuple(reply["steps"]), damaged, reply["ever_held"], reply["is_common"], reply["text"]
        )

    def _read_together(self, step: int, rejected: list[Rejected]) -> LoadedCheckpoint | None:
        """What this rank needs of the step; if any rank finds damage, None, and it is rejected."""
        # The manifest first, on all ranks: choosing files asks the users' objects, which may be
        # collective, so that either every rank comes to it or none.
        manifest = self._on_all(step, "record", lambda: self._restorer.manifest(step), rejected)
        if manifest is None:
            return None
        data = self._on_all(step, "files", partial(self._read_needed, manifest), rejected)
        if data is None:
            return None
        return LoadedCheckpoint(self._with_positions_elsewhere(manifest), data, tuple(rejected))

    def _on_all(
        self, step: int, what: str, read: Callable[[], T], rejected: list[Rejected]
    ) -> T | None:
        """What ``read()`` returns here; None if it finds damage on any rank."""
        found: list[T] = []

        def look() -> str | None:
            try:
                found.append(read())
            except CorruptCheckpointError as error:
                return str(error)
            return None

        texts = self._meetings.act(f"restore(): reading the {what} of step {step}", look)
        damage = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if damage:
            is_here = any(texts[rank] is not None for rank in self._role.group)
            rejected.append(self._rejected(step, "; ".join(damage), here=is_here))
            return None
        return found[0]

    def _read_needed(self, manifest: Manifest) -> Mapping[str, memoryview]:
        wanted = needed_files(self._chk, manifest, self._role)
        files = [file for file in manifest.files if file.name in wanted]
        return self._restorer.read(manifest, files)

    def _with_positions_elsewhere(self, manifest: Manifest) -> Manifest:
        """With a directory per node, the manifest also gets the positions in the others."""
        if self._role.shares_all:
            return manifest
        held = {rank: own.get(POSITIONS, {}) for rank, own in manifest.ranks.items()}
        everywhere = self._meetings.act(
            "restore(): positions", lambda: held if self._role.leads else {}, decide=_united
        )
        others = {int(rank): {POSITIONS: nodes} for rank, nodes in everywhere.items()}
        return replace(manifest, ranks={**others, **manifest.ranks})

    def _damaged(self, step: int, texts: Mapping[int, str]) -> Rejected:
        """``texts``: what is wrong with the manifest, by the rank that leads in its directory."""
        said = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        return self._rejected(step, said, here=self._role.leader in texts)

    def _rejected(self, step: int, text: str, *, here: bool) -> Rejected:
        error = CorruptCheckpointError(
            self._path, check=f"step {step}", expected="to be valid on all ranks", got=text
        )
        return Rejected(step, error, is_here=here)

    def _none_valid(self, common: _Common, rejected: Sequence[Rejected]) -> CorruptCheckpointError:
        texts = "; ".join(str(item.error) for item in rejected)
        return CorruptCheckpointError(
            self._path,
            check=NONE_VALID,
            expected="at least one step that every rank's directory holds and that validates",
            got=f"{common.text}{'; ' * bool(texts)}{texts}",
        )


def _common(said: Sequence[Json]) -> Json:
    held = {rank: words for rank, words in enumerate(said) if words is not None}
    attempts = [words["attempts"] for words in held.values()]
    steps = sorted((int(s) for s in attempts[0] if _is_in_all(s, attempts)), reverse=True)
    damaged: dict[str, dict[int, str]] = {}
    for rank, words in held.items():
        for step, text in words["damaged"].items():
            damaged.setdefault(step, {})[rank] = text
    return {
        "steps": steps,
        "damaged": damaged,
        "ever_held": any(words["ever_held"] for words in held.values()),
        "is_common": any(words["is_common"] for words in held.values()),
        "text": "; ".join(f"rank {rank}: {_steps(words)}" for rank, words in held.items()),
    }


def _is_in_all(step: str, attempts: Sequence[Mapping[str, str]]) -> bool:
    return len({held.get(step) for held in attempts}) == 1


def _united(said: Sequence[Json]) -> Json:
    return {rank: nodes for held in said for rank, nodes in held.items()}


def _steps(words: Json) -> str:
    return ", ".join(map(str, sorted(map(int, words["attempts"])))) or "none"
