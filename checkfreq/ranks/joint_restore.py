"""Restores many ranks together: the newest step that is valid for all of them.

The leaders list the steps in their directories, each with its attempt: two directories may hold the
same step from different attempts, and these must not be mixed. The same is asked of the mirror, if
there is one. A step of the directories that workers on some machine still hold in memory is read
from there first, and from the directory what they do not hold. Then every rank loads what it needs
of the newest step that all directories hold, or all mirrors: stage by stage, so that none begins to
change what is live before every rank has compared, nor overwrites tensors before user code has run
on all. If a rank finds damage at any stage, or cannot read twice, all ranks go on to the next older
step, or to the mirror's copy.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from checkfreq.errors import (
    CorruptCheckpointError,
    NoCheckpointError,
    StorageError,
    is_outage,
    storage_errors,
)
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import Merge, agreeing, some_say
from checkfreq.ranks.neighbours import shared_reads
from checkfreq.restore.apply import RestorePlan
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.in_place import InPlace
from checkfreq.restore.needed_files import needed_files
from checkfreq.restore.record_reader import RecordReader
from checkfreq.restore.restorer import Restorer
from checkfreq.restore.shared_reads import SharedReads
from checkfreq.state.capture import POSITIONS
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.source import NONE_VALID, CheckpointSource, Rejected
from checkfreq.store.tree import Tree
from checkfreq.types import Json, Role

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: After so long what a rank could not read is tried again, once in a restore.
_PAUSE_S = 0.5
#: The longest that a download may take: each of its requests has its own timeouts.
_LATENCY_S, _SLOWEST_BYTES_PER_S = 600.0, 1e6


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """A step of one source; those to try first come first."""

    age: int
    source: int

    @property
    def step(self) -> int:
        return -self.age

    def __str__(self) -> str:
        return f"step {self.step}"


@dataclass(frozen=True, slots=True)
class _Common:
    """The steps that every directory, or every mirror, holds, and what is said besides.

    ``damaged``: what is wrong with a manifest, by the rank that leads in its directory.
    """

    candidates: tuple[_Candidate, ...]
    damaged: Mapping[_Candidate, Mapping[int, str]]
    ever_held: bool
    is_common: bool
    text: str


class JointRestorer:
    """One rank's side of a restore. All ranks make the same calls, in the same order."""

    def __init__(
        self,
        restorer: Restorer,
        meetings: Meetings,
        loading: InPlace,
        *,
        chk: CFCheckpoint,
        role: Role,
    ) -> None:
        self._restorer = restorer
        self._meetings = meetings
        self._loading = loading
        self._chk = chk
        self._role = role
        self._name = restorer.name

    def restore(self, step: int | None) -> tuple[FoundCheckpoint, RestorePlan] | None:
        """Load ``step``, or the newest step that is valid on all ranks.

        None if no directory ever held one. Raises on all ranks NoCheckpointError (some directory
        lacks the step) and CorruptCheckpointError (it, or every step, fails validation). Any other
        error on one rank is a RankError on the others.
        """
        with storage_errors(f"reading {self._name}"):
            return self._restore(step)

    def _restore(self, step: int | None) -> tuple[FoundCheckpoint, RestorePlan] | None:
        common = self._common()
        tried = sorted({*common.candidates, *common.damaged})
        if step is not None:
            tried = [one for one in tried if one.step == step]
            if not tried:
                raise NoCheckpointError(f"not every rank has step {step}; they have: {common.text}")
        if not tried and not common.ever_held:
            return None
        if not common.candidates and not self._role.shares_all and not common.is_common:
            logger.warning(
                "no step was ever committed in the directories of all ranks (%s): starting over",
                common.text,
            )
            return None
        rejected: list[Rejected] = []
        is_patient = True
        for one in tried:
            if one in common.damaged:
                rejected.append(self._damaged(one, common.damaged[one]))
                continue
            done = self._load_together(one, rejected)
            if done is None and rejected[-1].is_unreadable and is_patient:
                is_patient = False
                rejected.pop()
                time.sleep(_PAUSE_S)
                done = self._load_together(one, rejected)
            if done is not None:
                found, plan = done
                return replace(found, rejected=tuple(rejected)), plan
        if step is not None and not {*tried}.difference(common.damaged):
            raise rejected[-1].error
        raise self._none_valid(common, rejected)

    def _common(self) -> _Common:
        reply = self._meetings.act(
            "restore(): looking for checkpoints",
            self._inventory,
            merge=_INVENTORIES,
        )
        damaged: dict[_Candidate, dict[int, str]] = {}
        for step, source, rank, text in reply["damaged"]:
            damaged.setdefault(_Candidate(-step, source), {})[rank] = text
        return _Common(
            tuple(_Candidate(-step, source) for step, source in reply["steps"]),
            damaged,
            reply["ever_held"],
            reply["is_common"],
            reply["text"],
        )

    def _inventory(self) -> Json:
        held = {"memory": self._restorer.in_memory()}
        return {**self._restorer.inventory(), **held} if self._role.leads else held

    def _load_together(
        self, one: _Candidate, rejected: list[Rejected]
    ) -> tuple[FoundCheckpoint, RestorePlan] | None:
        """Load what this rank needs of a step; None, and it is rejected, if any finds damage."""
        # The manifest first, on all ranks: choosing files asks the users' objects, which may be
        # collective, so that either every rank comes to it or none.
        source = self._restorer.sources[one.source]
        manifest = self._manifest(one, source, rejected)
        if manifest is None:
            return None
        choose = partial(self._needed, manifest, source)
        files = self._on_all(f"choosing files of {one}", choose, one, rejected)
        if files is None:
            return None
        manifest = self._with_positions_elsewhere(manifest)
        with (
            shared_reads(self._meetings, source, one.step, files) as shared,
            self._restorer.reading(manifest, files, source, shared=shared) as found,
        ):
            plan = self._load(found, one, rejected, shared)
        return None if plan is None else (found, plan)

    def _manifest(
        self, one: _Candidate, source: CheckpointSource, rejected: list[Rejected]
    ) -> Manifest | None:
        """What this rank needs of the record of a step; None if any rank finds damage."""
        read = partial(self._restorer.head, one.step, source)
        root = self._on_all(f"reading the record of {one}", read, one, rejected)
        if root is None:
            return None
        reader = RecordReader(source, root, role=self._role)
        if self._any_is_tree(root):
            for what, stage in reader.stages(self._chk):
                if self._on_all(f"{what} {one}", partial(_done, stage), one, rejected) is None:
                    return None
        return reader.manifest

    def _any_is_tree(self, root: Manifest | Tree) -> bool:
        """Whether any rank reads a tree; ranks that share a directory read the same."""
        is_tree = isinstance(root, Tree)
        if self._role.shares_all:
            return is_tree
        said = "a tree" if is_tree else None
        return bool(self._meetings.act("restore(): records", lambda: said, merge=some_say))

    def _load(
        self,
        found: FoundCheckpoint,
        one: _Candidate,
        rejected: list[Rejected],
        shared: SharedReads | None,
    ) -> RestorePlan | None:
        """Every stage of ``InPlace``, each on all ranks before the next one begins."""
        loading = self._loading
        compare = partial(loading.compare, found)
        plan = self._on_all(f"comparing {one}", compare, one, rejected)
        if plan is None:
            return None
        stages: tuple[tuple[str, Callable[[RestorePlan], None], bool], ...] = (
            ("reading the files of", partial(loading.fetch, found), True),
            ("loading", loading.load, False),
            ("reading", loading.stream, True),
        )
        for what, stage, is_long in stages:
            phase = f"{what} {one}"
            passed = partial(_pass, stage, plan, shared if is_long else None)
            try:
                if not self._has_passed(phase, passed, found, one, rejected, is_long):
                    loading.take_back()
                    return None
            except Exception:
                loading.take_back()
                raise
        finish = partial(loading.finish, plan)
        self._meetings.act(f"restore(): finishing {one}", finish, merge=agreeing())
        return plan

    def _on_all(
        self, phase: str, read: Callable[[], T], one: _Candidate, rejected: list[Rejected]
    ) -> T | None:
        """What ``read()`` returns here; None if it finds damage on any rank."""
        found: list[T] = []

        def look() -> Json:
            try:
                found.append(read())
            except CorruptCheckpointError as error:
                return {"text": str(error), "is_outage": False}
            except OSError as error:
                if not is_outage(error):
                    raise
                self._restorer.sources[one.source].steps()  # raises where nothing can be read there
                return {"text": str(error), "is_outage": True}
            return None

        said = self._meetings.act(f"restore(): {phase}", look, merge=some_say)
        if said:
            text = "; ".join(f"rank {rank}: {one_said['text']}" for rank, one_said in said)
            is_here = any(rank in self._role.group for rank, _ in said)
            is_unread = any(one_said["is_outage"] for _, one_said in said)
            rejected.append(
                self._unreadable(one, text)
                if is_unread
                else self._rejected(one, text, here=is_here)
            )
            return None
        return found[0]

    def _needed(self, manifest: Manifest, source: CheckpointSource) -> list[FileEntry]:
        wanted = needed_files(self._chk, manifest, self._role)
        files = [file for file in manifest.files if file.name in wanted]
        source.check_sizes(manifest.step, files)
        return files

    def _has_passed(
        self,
        phase: str,
        stage: Callable[[], bool],
        found: FoundCheckpoint,
        one: _Candidate,
        rejected: list[Rejected],
        is_long: bool,
    ) -> bool:
        """Do a stage; False if any rank found damage."""
        if found.remote is None or not is_long:
            return self._on_all(phase, stage, one, rejected) is not None
        # Ranks download at different rates, and no rank waits for another for more than
        # ``rank_timeout_s``: they meet while they read.
        with ThreadPoolExecutor(1, thread_name_prefix="checkfreq-download") as pool:
            reading = pool.submit(stage)
            limit_s = _LATENCY_S + found.manifest.num_bytes / _SLOWEST_BYTES_PER_S
            self._meetings.until(
                f"restore(): {phase} from the mirror",
                partial(_has_ended, reading),
                left_s=lambda waited_s: limit_s - waited_s,
                what="the mirror's files",
            )
            return self._on_all(phase, reading.result, one, rejected) is not None

    def _with_positions_elsewhere(self, manifest: Manifest) -> Manifest:
        """With a directory per node, the manifest also gets the positions in the others."""
        if self._role.shares_all:
            return manifest
        held = {rank: own.get(POSITIONS, {}) for rank, own in manifest.ranks.items()}
        everywhere = self._meetings.act(
            "restore(): positions", lambda: held if self._role.leads else {}, merge=_UNITED
        )
        others = {int(rank): {POSITIONS: nodes} for rank, nodes in everywhere.items()}
        return replace(manifest, ranks={**others, **manifest.ranks})

    def _damaged(self, one: _Candidate, texts: Mapping[int, str]) -> Rejected:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        return self._rejected(one, said, here=self._role.leader in texts)

    def _unreadable(self, one: _Candidate, text: str) -> Rejected:
        place = self._restorer.sources[one.source].where(one.step)
        error = StorageError(errno.EIO, f"cannot be read on all ranks: {text}", place)
        return Rejected(one.step, error, is_here=False)

    def _rejected(self, one: _Candidate, text: str, *, here: bool) -> Rejected:
        source = self._restorer.sources[one.source]
        error = CorruptCheckpointError(
            source.name, check=f"step {one.step}", expected="to be valid on all ranks", got=text
        )
        return Rejected(
            one.step,
            error,
            is_here=here and source.is_local and not source.is_memory,
            in_mirror=not source.is_local,
            in_memory=source.is_memory,
        )

    def _none_valid(self, common: _Common, rejected: Sequence[Rejected]) -> Exception:
        for item in rejected:
            if item.is_unreadable:
                return item.error
        texts = "; ".join(str(item.error) for item in rejected)
        return CorruptCheckpointError(
            self._name,
            check=NONE_VALID,
            expected="at least one step that every rank's directory holds and that validates",
            got=f"{common.text}{'; ' * bool(texts)}{texts}",
        )


def _pass(
    stage: Callable[[RestorePlan], None], plan: RestorePlan, shared: SharedReads | None
) -> bool:
    with contextlib.nullcontext() if shared is None else shared.stage():
        stage(plan)
    return True


def _done(stage: Callable[[], object]) -> bool:
    stage()
    return True


def _has_ended(reading: Future[T], timeout_s: float) -> bool:
    return bool(wait([reading], timeout=timeout_s).done)


def _inventory(rank: int, said: Json) -> Json:
    held = [[rank, said]] if "sources" in said else []
    return {"held": held, "memory": said["memory"]}


def _joined(words: Sequence[Json]) -> Json:
    """What the leaders hold, each by itself, and what any rank has in memory."""
    return {
        "held": [pair for word in words for pair in word["held"]],
        "memory": sorted({step for word in words for step in word["memory"]}),
    }


def _common(word: Json) -> Json:
    held = dict(word["held"])
    by_source = list(zip(*(words["sources"] for words in held.values()), strict=True))
    steps: list[tuple[int, int]] = []
    found_in = {number: found for number, found in enumerate(by_source) if found[0] is not None}
    for number, found in found_in.items():
        attempts = [one["attempts"] for one in found]
        steps += [(int(step), number) for step in attempts[0] if _is_in_all(step, attempts)]
    # In memory, which comes before the directory: what is committed, and some rank holds parts of.
    steps += [(step, 0) for step, number in steps if number == 1 and step in word["memory"]]
    return {
        "steps": steps,
        "damaged": [
            (int(step), number, rank, text)
            for number, found in found_in.items()
            for rank, one in zip(held, found, strict=True)
            for step, text in one["damaged"].items()
        ],
        "ever_held": any(words["ever_held"] for words in held.values()),
        "is_common": any(words["is_common"] for words in held.values()),
        "text": "; ".join(f"rank {rank}: {_steps(words)}" for rank, words in held.items()),
    }


_INVENTORIES = Merge(_inventory, _joined, _common)


def _is_in_all(step: str, attempts: Sequence[Mapping[str, str]]) -> bool:
    return len({held.get(step) for held in attempts}) == 1


def _united(words: Sequence[Json]) -> Json:
    return {rank: nodes for held in words for rank, nodes in held.items()}


_UNITED = Merge(lambda rank, held: held, _united, lambda held: held)


def _steps(words: Json) -> str:
    here, *mirrors = (_listed(one) for one in words["sources"] if one is not None)
    return "; ".join([here, *(f"in the mirror {steps}" for steps in mirrors)])


def _listed(one: Json) -> str:
    return ", ".join(map(str, sorted(map(int, one["attempts"])))) or "none"
