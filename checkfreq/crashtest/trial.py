"""The crash test itself: two whole runs, lives with kills, and a comparison after each."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from checkfreq.crashtest.causes import (
    Cause,
    Evidence,
    likely_causes,
    why_not_deterministic,
    why_not_resumed,
)
from checkfreq.crashtest.compare import Difference, changes, first_difference, noise
from checkfreq.crashtest.history import Record
from checkfreq.crashtest.life import Kill, Lived, OverdueError, on_ranks, run
from checkfreq.crashtest.plan import VARIABLES, Plan
from checkfreq.crashtest.verdict import Death, Outcome, Verdict
from checkfreq.errors import ConfigError
from checkfreq.supervisor.processes import signal_name

#: Stands for the folder of a run's checkpoints in the command of a script that saves by itself.
PLACEHOLDER = "{dir}"
#: A run that is shorter has no room for kills.
_LEAST_STEPS = 4
#: How many steps a script may go on after the one at which it is to be killed.
_MOST_OUTRUN = 3
_MOST_DELAY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asks for. ``work``: an empty folder for all that the crash test writes.

    ``folder`` and ``pattern``: of a script that saves by itself, where, and under which names.
    ``jobs``: how many uninterrupted runs at once.
    """

    command: Sequence[str]
    work: Path = Path()
    ranks: int = 1
    kills: int = 4
    seed: int = 0
    signal: int = signal.SIGKILL
    is_group: bool = False
    folder: str = ""
    pattern: str = ""
    timeout_s: float = 3600.0
    jobs: int = 1

    @property
    def has_placeholder(self) -> bool:
        """Whether the script is told in which folder to save."""
        return any(PLACEHOLDER in word for word in self.command)


class Trial:
    """One crash test of one command. ``say`` is given a line of progress at a time."""

    def __init__(self, settings: Settings, *, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._dice = random.Random(settings.seed)
        self._deaths: list[Death] = []
        self._notes: list[str] = []
        self._ignored: frozenset[str] = frozenset()
        self._numbers = itertools.count(1)
        self._file_bytes = 0
        self._start_s = time.monotonic()
        self._own_folder = Path(settings.folder).absolute() if settings.folder else None
        self._check()

    def _check(self) -> None:
        settings = self._settings
        if settings.has_placeholder and settings.folder:
            raise ConfigError(f"--dir and {PLACEHOLDER} in the command: expected one of them")
        folder = self._own_folder
        if folder is not None and folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"--dir {settings.folder}: expected an empty folder, or none: it is emptied before "
                "each run, and yours holds files. Have the script save elsewhere for this test"
            )

    def run(self) -> Verdict:
        """Raises ConfigError where the script fails by itself, or cannot be tested."""
        first, second = self._whole_runs()
        self._whole = first.records
        self._ignored = noise(first.records, second.records)
        difference = self._compare(second, is_over=True)
        if difference is not None and difference.failed_at is not None:
            return self._not_deterministic(first, second)
        self._tell_ignored()
        self._step_s = first.seconds / max(1, self._main.num_steps)
        return self._killed()

    @property
    def _main(self) -> Record:
        return self._whole.get(0) or Record()

    @property
    def _has_manager(self) -> bool:
        return self._main.has_manager

    # ---- whole runs

    def _whole_runs(self) -> tuple[Lived, Lived]:
        if self._settings.jobs > 1 and self._own_folder is None:
            self._say("two uninterrupted runs, at the same time")
            with ThreadPoolExecutor(2) as pool:
                one, two = pool.map(self._whole_run, ("whole-1", "whole-2"))
            return one, two
        self._say("an uninterrupted run")
        one = self._whole_run("whole-1")
        self._say(f"{one.main.num_steps} steps in {one.seconds:.1f} s; the same again")
        return one, self._whole_run("whole-2")

    def _whole_run(self, name: str) -> Lived:
        lived = self._live(name, Plan(home=""))
        if lived.code != 0:
            raise ConfigError(
                f"the script failed without a kill: expected exit status 0, found {lived.code}. "
                f"The end of its output:\n{_last_lines(lived.tail)}"
            )
        record = lived.main
        if not record.has_manager and not (self._own_folder or self._settings.has_placeholder):
            raise ConfigError(
                "the script made no CFManager: expected one, or --dir DIR --glob 'PATTERN' for a "
                f"script that saves by itself ({PLACEHOLDER} in its arguments stands for DIR)"
            )
        if record.num_steps < _LEAST_STEPS:
            raise ConfigError(
                f"the script passed {record.num_steps} iteration boundaries: expected "
                f"{_LEAST_STEPS} or more. Is PYTHONPATH kept, and does it train with torch?"
            )
        self._keep_files(name)
        return lived

    def _keep_files(self, name: str) -> None:
        """Note how large checkpoints are, and remove them: what they held was recorded."""
        files = self._files(name)
        if files is not None and files.exists():
            sizes = [p.stat().st_size for p in files.rglob(self._pattern) if p.is_file()]
            if not sizes:
                raise ConfigError(
                    f"no file in {files} matches {self._pattern!r}: expected checkpoints there "
                    "after a run. Give --glob the pattern of their names"
                )
            self._file_bytes = max(sizes)
            _empty(files)
        shutil.rmtree(self._home(name), ignore_errors=True)

    @property
    def _pattern(self) -> str:
        return self._settings.pattern or "*"

    def _not_deterministic(self, first: Lived, second: Lived) -> Verdict:
        """Two uninterrupted runs differ: does a third that shares the first one's hash seed?"""
        state = frozenset(name for name in self._ignored if not name.startswith(VARIABLES))
        difference = first_difference(first.records, second.records, is_over=True, ignoring=state)
        assert difference is not None
        is_by_hash = False
        if "PYTHONHASHSEED" not in os.environ:
            self._say("they differ; once more, with the hash seed of the first")
            third = self._live("whole-3", Plan(home="", hash_seed=first.plan.hash_seed))
            is_by_hash = third.code == 0 and self._compare(third, is_over=True) is None
        evidence = Evidence(difference, self._whole[difference.rank])
        causes = why_not_deterministic(evidence, is_by_hash=is_by_hash)
        return self._verdict(Outcome.NOT_DETERMINISTIC, difference, tuple(causes))

    def _tell_ignored(self) -> None:
        """What differs alone and is no part of training, the time of day in a log, say."""
        state = sorted(name for name in self._ignored if not name.startswith(VARIABLES))
        if state:
            self._notes.append(
                f"left out, since it differs in uninterrupted runs too: {_some(state)}"
            )

    # ---- lives with kills

    def _killed(self) -> Verdict:
        """Kill it at instants of training, once more when all is trained, and let it end."""
        reached, torn_before, was_over = 0, False, False
        harmless: Difference | None = None
        for number in range(self._settings.kills + 2):
            plan, kill = self._aim(number, reached)
            lived = self._live("killed", plan, kill)
            self._align(lived)
            self._told_restored(lived, number)
            last_step = max((one.last_step for one in lived.records.values()), default=0)
            is_over = 0 <= plan.die_at <= last_step
            died = lived.was_killed or is_over or (plan.tear_at >= 0 and lived.code != 0)
            if not died and lived.code != 0:
                cause = why_not_resumed(lived.tail, was_torn=torn_before, was_over=was_over)
                return self._verdict(Outcome.FAILED, causes=(cause,))
            difference = self._compare(lived, is_over=not died)
            if difference is not None and difference.failed_at is None:
                harmless = harmless or difference
            elif difference is not None:
                return self._differs(difference, lived, harmless)
            if not died:
                break
            torn_before, was_over = plan.tear_at >= 0, is_over
            reached = max(reached, last_step)
            how = _how(plan, kill, ranks=self._settings.ranks)
            self._deaths.append(Death(last_step, how, None))
            self._say(f"killed after step {last_step} ({how})")
        if harmless is not None:
            self._notes.append(
                f"{harmless.first}, at step {harmless.step} after a restore, made no difference"
            )
        return self._verdict(Outcome.EXACT)

    def _aim(self, number: int, reached: int) -> tuple[Plan, Kill | None]:
        """Where a life is to save, and how it is to end. The last is not killed."""
        settings, total = self._settings, self._main.num_steps
        plan = Plan(home="", steps={} if self._has_manager else self._main.keys())
        if number > settings.kills:
            return plan, None
        if number == settings.kills:
            return replace(plan, saves=(total,), die_at=total), None
        dice = self._dice
        low = max(reached + 1, total * number // settings.kills, 2)
        high = max(low, total * (number + 1) // settings.kills)
        step = min(dice.randint(low, high), total - 1)
        if not self._has_manager and number == 0:
            return replace(plan, tear_at=step // 2 + 1, tear_bytes=self._file_bytes // 2), None
        plan = replace(plan, hold_at=min(step + _MOST_OUTRUN, total - 1))
        if self._has_manager:
            plan = replace(plan, saves=(max(1, step - dice.randint(1, 3)),), tries=(step,))
        kill = Kill(
            at_step=step,
            delay_s=dice.uniform(0.0, min(self._step_s, _MOST_DELAY_S)),
            signal=settings.signal,
            rank=dice.randrange(settings.ranks),
            is_group=settings.is_group,
            is_lost=number % 2 == 1 and settings.signal == signal.SIGKILL,
        )
        if number == 2 and settings.kills > 3:
            kill = replace(kill, at_step=-1, delay_s=dice.uniform(0.0, _MOST_DELAY_S))
        return plan, kill

    def _told_restored(self, lived: Lived, number: int) -> None:
        deaths = self._deaths
        if number and deaths and lived.main.begin is not None:
            deaths[-1] = replace(deaths[-1], restored=lived.main.first_step)
            self._say(f"went on from step {lived.main.first_step}")

    def _align(self, lived: Lived) -> None:
        """Find the step at which a script went on whose state is that of no step as a whole."""
        if self._has_manager:
            return
        keys = self._main.keys()
        for rank, record in lived.records.items():
            begin = record.begin
            if begin is None or begin.key in keys or rank not in self._whole:
                continue
            state = begin.changed
            alike = {
                step: sum(other.get(name) == text for name, text in state.items())
                for step, line, other in self._whole[rank].steps()
                if line.kind != "end"
            }
            record.shift = max(alike, key=lambda step: alike[step]) - begin.step

    def _compare(self, lived: Lived, *, is_over: bool) -> Difference | None:
        return first_difference(self._whole, lived.records, is_over=is_over, ignoring=self._ignored)

    # ---- what differs

    def _differs(
        self, difference: Difference, lived: Lived, harmless: Difference | None
    ) -> Verdict:
        self._say(f"step {difference.failed_at} differs: {difference.first}")
        if harmless is not None and _is_kept(difference, harmless):
            difference = replace(harmless, failed_at=difference.failed_at)
        else:
            difference = self._in_detail(difference, lived)
        causes = likely_causes(Evidence(difference, self._whole[difference.rank]))
        return self._verdict(Outcome.DIFFERS, difference, tuple(causes))

    def _in_detail(self, one: Difference, lived: Lived) -> Difference:
        """The difference to a run that was read where that life went on, if the first was not."""
        whole = self._whole[one.rank]
        steps = one.restored, one.restored + 1
        if all(whole.has_variables(step) for step in steps if 0 < step <= whole.last_step):
            return one
        self._say(f"an uninterrupted run, to read all of steps {steps[0]} and {steps[1]}")
        if self._own_folder is not None:
            _empty(self._own_folder)
        plan = Plan(home="", reads=(*steps, one.step), die_at=one.step + 1)
        detailed = self._live("whole-3", plan).records
        found = first_difference(detailed, lived.records, is_over=False, ignoring=self._ignored)
        if found is None or found.failed_at is None:
            return one
        self._whole = {**self._whole, **detailed}
        return found

    # ---- one life

    def _home(self, name: str) -> Path:
        return self._settings.work / f"{name}-home"

    def _files(self, name: str) -> Path | None:
        """Where a script that saves by itself does so in this run; None if it has a manager."""
        if self._settings.has_placeholder:
            return self._home(name) / "files"
        return self._own_folder

    def _live(self, name: str, plan: Plan, kill: Kill | None = None) -> Lived:
        settings, home, files = self._settings, self._home(name), self._files(name)
        (files or home).mkdir(parents=True, exist_ok=True)
        home.mkdir(parents=True, exist_ok=True)
        number = next(self._numbers)
        life = settings.work / f"life-{number}-{name}"
        plan = replace(
            plan,
            home=str(home),
            files=str(files or ""),
            pattern=self._pattern if files else "",
            hash_seed=plan.hash_seed or (settings.seed * 1000 + number) % (1 << 32),
        )
        command = [word.replace(PLACEHOLDER, str(files)) for word in settings.command]
        command = on_ranks(command, settings.ranks)
        try:
            lived = run(command, life, plan, kill=kill, timeout_s=settings.timeout_s)
        except OverdueError as error:
            raise ConfigError(str(error)) from None
        failures = {text for record in lived.records.values() for text in record.failures}
        self._notes += [f"not all was recorded: {text}" for text in failures]
        return lived

    def _verdict(
        self,
        outcome: Outcome,
        difference: Difference | None = None,
        causes: tuple[Cause, ...] = (),
    ) -> Verdict:
        return Verdict(
            outcome=outcome,
            num_steps=self._main.num_steps,
            ranks=self._settings.ranks,
            seed=self._settings.seed,
            deaths=tuple(self._deaths),
            difference=difference,
            causes=causes,
            notes=tuple(self._notes),
            seconds=time.monotonic() - self._start_s,
        )


def _is_kept(difference: Difference, before: Difference) -> bool:
    """Whether what a life before did otherwise is in the checkpoint that this one went on from."""
    one = difference
    if one.before is None or one.begin is None or before.rank != one.rank:
        return False
    names = {item.name for item in before.items}
    return any(item.name in names for item in changes(one.before[1], one.begin[1]))


def _how(plan: Plan, kill: Kill | None, *, ranks: int) -> str:
    if kill is None and plan.die_at >= 0:
        return "after its last checkpoint"
    if kill is None:
        return "in the middle of a save"
    whom = "the script" if ranks == 1 else f"rank {kill.rank}"
    whom = "every process" if kill.is_group or kill.is_lost else whom
    when = ", while it started" if kill.at_step < 0 else ""
    return f"{signal_name(kill.signal)} to {whom}{when}"


def _some(names: list[str]) -> str:
    shown = names[:4]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-12:]) or "(nothing)"


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
