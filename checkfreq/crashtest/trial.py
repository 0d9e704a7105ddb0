"""The crash test itself: two whole runs, lives with kills, and a search around what differs."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from checkfreq.crashtest.causes import Cause, Evidence, likely_causes, why_not_deterministic
from checkfreq.crashtest.compare import Difference, What, first_difference
from checkfreq.crashtest.history import Record
from checkfreq.crashtest.life import Kill, Lived, OverdueError, on_ranks, run
from checkfreq.crashtest.plan import Plan
from checkfreq.crashtest.verdict import Death, Outcome, Progress, Verdict
from checkfreq.errors import ConfigError
from checkfreq.supervisor.processes import signal_name

#: Stands for the folder of a run's checkpoints in the command of a script that saves by itself.
PLACEHOLDER = "{dir}"
#: A run that is shorter has no room for kills.
_LEAST_STEPS = 4
#: What may differ between uninterrupted runs while all else is the same: the time of day in a file
#: or an object, a generator that nobody seeds or uses.
_MAY_DIFFER = (What.OBJECT, What.FILE, What.GENERATOR)
#: How many steps a script may go on after the one at which it is to be killed.
_MOST_OUTRUN = 3
_MOST_DELAY_S = 0.25
_MOST_PROBES = 4


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
        self._progress = Progress()
        self._ignored: frozenset[str] = frozenset()
        self._num_lives = 0
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
        difference = self._compare_whole_runs(second)
        if difference is not None:
            cause = why_not_deterministic(difference)
            return self._verdict(Outcome.NOT_DETERMINISTIC, difference, (cause,))
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

    def _compare_whole_runs(self, second: Lived) -> Difference | None:
        """How two uninterrupted runs differ; what differs alone and is no part of training (the
        time of day in a log, say) is left out from then on.
        """
        ignored: set[str] = set()
        while True:
            found = first_difference(
                self._whole, second.records, is_over=True, ignoring=frozenset(ignored)
            )
            if found is None:
                break
            names = {i.name for i in found.items if i.what in _MAY_DIFFER}
            if len(names) < len(found.items):
                return found
            ignored |= names
        if ignored:
            self._ignored = frozenset(ignored)
            self._progress.notes.append(
                f"left out, since it differs in uninterrupted runs too: {_some(ignored)}"
            )
        return None

    # ---- lives with kills

    def _killed(self) -> Verdict:
        home, reached = "killed", 0
        torn_before = False
        for number in range(self._settings.kills + 1):
            plan, kill = self._aim(number, reached)
            lived = self._live(home, plan, kill)
            self._align(lived)
            self._told_restored(lived, number)
            died = lived.was_killed or (plan.tear_at >= 0 and lived.code != 0)
            if not died and lived.code != 0:
                return self._failed(lived, was_torn=torn_before)
            difference = self._compare(lived, is_over=not died)
            if difference is not None:
                return self._differs(difference, was_torn=torn_before)
            if not died:
                break
            torn_before = plan.tear_at >= 0
            reached = max(reached, lived.main.last_step)
            how = _how(kill, ranks=self._settings.ranks)
            self._progress.deaths.append(Death(lived.main.last_step, how, None))
            self._say(f"killed after step {lived.main.last_step} ({how})")
        return self._verdict(Outcome.EXACT)

    def _aim(self, number: int, reached: int) -> tuple[Plan, Kill | None]:
        """Where a life is to save, and how it is to end. The last is not killed."""
        settings, total = self._settings, self._main.num_steps
        plan = Plan(home="", steps={} if self._has_manager else self._main.keys())
        if number == settings.kills:
            return plan, None
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
        deaths = self._progress.deaths
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

    def _failed(self, lived: Lived, *, was_torn: bool) -> Verdict:
        evidence = Evidence(None, self._main, lived.tail or "no output", was_torn)
        return self._verdict(Outcome.FAILED, causes=tuple(likely_causes(evidence)))

    def _differs(self, difference: Difference, *, was_torn: bool) -> Verdict:
        self._say(f"step {difference.step} differs: {difference.first}")
        if self._has_manager and difference.step > difference.restored + 1:
            difference = self._narrowed(difference)
        whole = self._whole[difference.rank]
        causes = likely_causes(Evidence(difference, whole, was_torn=was_torn))
        return self._verdict(Outcome.DIFFERS, difference, tuple(causes))

    def _narrowed(self, difference: Difference) -> Difference:
        """The same difference after a restore as close before it as possible, by bisection.

        A difference behind the last boundary (objects at the end) has no step before it to stop at.
        """
        low, high = difference.restored, min(difference.step, self._main.num_steps) - 1
        probe = high
        for _ in range(_MOST_PROBES):
            if probe <= low:
                break
            self._say(f"killing at step {probe}, to see whether step {difference.step} differs")
            found = self._probe(probe, until=difference.step)
            if found is not None:
                low, difference = probe, found
                high = min(high, found.step - 1)
            else:
                high = probe - 1
            probe = high if high - low <= 1 else (low + high + 1) // 2
        return difference

    def _probe(self, step: int, *, until: int) -> Difference | None:
        """Save and die at a step, restore, and go on to another; how that differs."""
        name = f"probe-{self._num_lives}"
        self._live(name, Plan(home="", saves=(step,), die_at=step))
        lived = self._live(name, Plan(home="", die_at=until + 1))
        shutil.rmtree(self._home(name), ignore_errors=True)
        return self._compare(lived, is_over=lived.code == 0)

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
        self._num_lives += 1
        life = settings.work / f"life-{self._num_lives}-{name}"
        plan = replace(
            plan, home=str(home), files=str(files or ""), pattern=self._pattern if files else ""
        )
        command = [word.replace(PLACEHOLDER, str(files)) for word in settings.command]
        try:
            return run(
                on_ranks(command, settings.ranks),
                life,
                plan,
                kill=kill,
                timeout_s=settings.timeout_s,
            )
        except OverdueError as error:
            raise ConfigError(str(error)) from None

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
            deaths=tuple(self._progress.deaths),
            difference=difference,
            causes=causes,
            notes=tuple(self._progress.notes),
            seconds=time.monotonic() - self._start_s,
        )


def _how(kill: Kill | None, *, ranks: int) -> str:
    if kill is None:
        return "in the middle of a save"
    whom = "the script" if ranks == 1 else f"rank {kill.rank}"
    whom = "every process" if kill.is_group or kill.is_lost else whom
    when = ", while it started" if kill.at_step < 0 else ""
    return f"{signal_name(kill.signal)} to {whom}{when}"


def _some(names: set[str]) -> str:
    shown = sorted(names)[:4]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-12:]) or "(nothing)"


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
