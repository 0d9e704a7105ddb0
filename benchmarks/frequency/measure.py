"""Overhead at equal intervals, and the smallest interval within the bound, of ours and others.

    python -m benchmarks.frequency --k 4 16
    python -m benchmarks.frequency --model resnet50 --image-size 224 --batch 256 --amp --k 2 10

One loop, and windows of every arm in random order, each between two windows with nothing attached
to the loop (lab/paired.py, saver_arm.py). If a peer is still saving when its next save is due,
training waits. Removing the previous checkpoint is charged to ours, not to peers. An overhead has a
confidence interval from three rounds on; to get these, a part may exceed its time up to a limit.
Lines:

``arm``    cost_ms: what a single checkpoint adds to training; the median and its 95 % interval.
           durable_ms: from its call until it is on disk. k_min: the smallest interval that keeps
           ``--bound`` by cost and whose saves do not wait for each other (ours has two slots).
           k: the smallest measured interval that kept the bound (one below k_min must keep it with
           its upper limit too); ours and the best peers are measured. overhead, low, high: at k.
           lost_s: half an interval of k (k_min where none was measured) plus durable_ms.
``equal``  the overhead of all arms at the same k, with its 95 % interval; waits included.
``policy`` the interval that AUTO, or the CheckFreq paper's policy (lab/paper_policy.py) in our
           engine, chose for this loop, and the overhead of that fixed interval in windows, with
           snapshots at ``place``. windows: from one checkpoint to the next, which the policy had
           for tuning, until its tuning or its time is over. These intervals do not count as k.
``target`` ours against the best peer whose checkpoints survive a power cut too: k, and overhead.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.frequency.decided import Choice, auto_choice, paper_choice
from benchmarks.frequency.findings import Alone, Findings, Setting, cost_of
from benchmarks.frequency.lines import Report
from benchmarks.frequency.saver_arm import Attached, SaverArm
from benchmarks.lab.estimate import undisturbed
from benchmarks.lab.overheads import Measured, undisturbed_rounds
from benchmarks.lab.paired import Round, clean_window, rounds
from benchmarks.lab.paper_policy import PaperTuner, Rule
from benchmarks.lab.training import Loop, add_loop_options
from benchmarks.peers import OURS, PEERS, Peer, installed
from benchmarks.peers.ours import CheckFreq
from checkfreq.types import SnapshotPlace

AUTO = "AUTO"
POLICIES = (AUTO, *(rule.value for rule in Rule))
_DEFAULT_ARMS = (
    *(OURS, "torch.save, synced", "safetensors, synced", "torchsnapshot, async, synced"),
    *("dcp.async_save, thread, aside", "dcp.async_save, process, aside"),
)
_WARM_UP_SAVES = 2
#: When each part ends, as a fraction of ``--seconds``.
_COSTS_UNTIL, _EQUAL_UNTIL, _POLICIES_UNTIL = 0.22, 0.5, 0.7
#: Fewer rounds give no confidence interval; a part may take that many times longer to get them.
_MIN_ROUNDS, _PATIENCE = 3, 1.25
#: The longest window, as a fraction of ``--seconds``.
_LONGEST = 0.06
#: The shortest window, as a multiple of ``--window``, however long that takes.
_TRIED_WINDOWS = 4


def main() -> None:
    """Measure, and print the lines."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    peers = {name: peer for name, peer in installed().items() if name in args.arms}
    loop = Loop.of(args, seed=args.seed)
    clean_window(loop, 10)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="frequency-") as scratch:
        Run(loop, Path(scratch), args, peers).measure()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_loop_options(parser)
    parser.set_defaults(batch=2)
    parser.add_argument("--arms", nargs="+", default=_DEFAULT_ARMS, choices=list(PEERS))
    parser.add_argument("--k", type=int, nargs="+", default=[4, 16], help="the same for all arms")
    parser.add_argument("--bound", type=float, default=0.035)
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=POLICIES)
    parser.add_argument("--verify", type=int, default=2, help="peers whose smallest k is measured")
    parser.add_argument("--window", type=int, default=6, help="iterations with a single checkpoint")
    parser.add_argument("--profile-iterations", type=int, default=30, help="of the paper's policy")
    parser.add_argument("--seconds", type=float, default=165.0, help="for all of it, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    args = parser.parse_args()
    if OURS not in args.arms:
        parser.error(f"--arms: {OURS} is the arm that the others are compared with")
    return args


class Run:
    """One loop, from the costs of a checkpoint to the intervals that follow."""

    def __init__(
        self, loop: Loop, scratch: Path, args: argparse.Namespace, peers: Mapping[str, Peer]
    ) -> None:
        self._loop, self._scratch, self._args, self._peers = loop, scratch, args, peers
        self._rng = random.Random(args.seed)
        self._began_s = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._savers: dict[str, Attached] = {}
        self._measured: dict[Setting, Measured] = {}
        rivals = [name for name, peer in peers.items() if peer.synced and name != OURS]
        self._found = Findings(OURS, rivals, bound=args.bound)

    def measure(self) -> None:
        """Measure all parts, then print the lines."""
        with self._stack:
            for name, peer in self._peers.items():
                self._attach(name, peer)
            self._warm_up(self._savers)
            self._measure_costs()
            self._measure_equal()
            policies = dict(self._choices())
            settings = {name: self._setting(choice) for name, choice in policies.items()}
            self._try_smallest([x for x in settings.values() if x is not None])
        report = Report(
            self._loop, self._args, self._peers, found=self._found, measured=self._measured
        )
        report.emit(policies, settings)

    def _attach(self, name: str, peer: Peer) -> None:
        folder = self._scratch / f"arm-{len(self._savers)}"
        folder.mkdir()
        saver = Attached(self._loop, peer, folder, queues=peer.name == OURS)
        self._stack.callback(saver.saver.close)
        self._savers[name] = saver

    def _at_s(self, part: float) -> float:
        """The time at which that fraction of the run is over."""
        return self._began_s + part * float(self._args.seconds)

    def _warm_up(self, names: Iterable[str]) -> None:
        _say("warming up")
        for name in names:
            arm = self._arm(name, self._args.window)
            for _ in range(_WARM_UP_SAVES):
                arm.window()

    def _arm(self, name: str, k: int, *, length: int = 1) -> SaverArm:
        return SaverArm(self._loop, self._savers[name], interval=k, length=length)

    def _rounds(
        self, arms: Mapping[str, SaverArm], *, until_s: float, late_s: float
    ) -> list[Round]:
        """As many rounds as fit, at least one, and until ``late_s`` enough for an interval."""
        began_s, done = time.monotonic(), list[Round]()
        for each in rounds(self._loop, arms, self._rng):
            done.append(each)
            now_s = time.monotonic()
            is_enough = len(undisturbed_rounds(done)) >= _MIN_ROUNDS
            if now_s + (now_s - began_s) / len(done) > (until_s if is_enough else late_s):
                break
        return done

    # ---- one checkpoint alone

    def _measure_costs(self) -> None:
        _say("one checkpoint alone")
        arms = {name: self._arm(name, self._args.window) for name in self._savers}
        for saver in self._savers.values():
            saver.saved.clear()
        until_s = self._at_s(_COSTS_UNTIL)
        done = self._rounds(arms, until_s=until_s, late_s=until_s)
        keep = undisturbed([each.foreign for each in done])
        iteration_s = statistics.median(each.iteration_s for each in itertools.compress(done, keep))
        for name, saver in self._savers.items():
            alone = [
                Alone(each.samples[name].cost_s, held_s, saved.durable_s, saved.persist_s)
                for each, (saved, held_s) in zip(done, saver.saved, strict=True)
            ]
            self._found.costs[name] = cost_of(
                list(itertools.compress(alone, keep)),
                iteration_s=iteration_s,
                bound=self._args.bound,
            )

    # ---- at intervals

    def _measure_equal(self) -> None:
        settings = [(name, k) for name in self._savers for k in self._args.k]
        until_s, late_s = self._at_s(_EQUAL_UNTIL), self._at_s(_PATIENCE * _EQUAL_UNTIL)
        self._measure(settings, length=self._args.window, until_s=until_s, late_s=late_s)

    def _measure(
        self, settings: Iterable[Setting], *, length: int, until_s: float, late_s: float
    ) -> None:
        """Measure the overhead of all settings in the same rounds."""
        settings = list(dict.fromkeys(settings))
        _say("at intervals: " + "; ".join(map(_key, settings)))
        arms = {_key(x): self._arm(*x, length=length) for x in settings}
        done = self._rounds(arms, until_s=until_s, late_s=late_s)
        for setting in settings:
            measured = Measured.of(_key(setting), done, seconds=0.0, taken=None)
            self._measured[setting] = measured
            self._found.tried[setting] = measured.estimate

    def _try_smallest(self, chosen: Iterable[Setting]) -> None:
        """Measure the policies' k and the smallest k of ours and a few peers, then neighbours."""
        costs, names = self._found.costs, (OURS, *self._found.closest(self._args.verify))
        due = [(name, costs[name].smallest.k) for name in names]
        self._found.aside = set(chosen) - set(due) - set(self._measured)
        wanted = [*due, *chosen]
        while settings := [x for x in wanted if x not in self._measured and self._is_short(x)]:
            began_s = time.monotonic()
            until_s = began_s + (self._at_s(1) - began_s) / 2
            self._measure(
                settings,
                length=_TRIED_WINDOWS * self._args.window,
                until_s=until_s,
                late_s=self._at_s(_PATIENCE),
            )
            now_s = time.monotonic()
            if now_s + (now_s - began_s) > self._at_s(1):
                break
            due = [(name, self._found.next_to_try((name, k))) for name, k in due]
            self._found.aside -= set(due)
            wanted = due

    def _is_short(self, setting: Setting) -> bool:
        _, k = setting
        window_s = k * self._found.costs[OURS].iteration_s
        return k <= _TRIED_WINDOWS * self._args.window or window_s <= _LONGEST * self._args.seconds

    # ---- policies

    def _setting(self, choice: Choice) -> Setting | None:
        """The arm with the policy's interval, its snapshots in the same place."""
        if choice.k is None:
            return None
        if choice.place is SnapshotPlace.HOST:
            return OURS, choice.k
        name = f"{OURS}, snapshots on the {choice.place.value}"
        if name not in self._savers:
            make = partial(CheckFreq, place=choice.place)
            self._attach(name, replace(PEERS[OURS], make=make))
            self._warm_up([name])
        return name, choice.k

    def _choices(self) -> Iterator[tuple[str, Choice]]:
        """The interval that each policy chooses for the loop."""
        names = list(self._args.policies)
        least_s = (_POLICIES_UNTIL - _EQUAL_UNTIL) * float(self._args.seconds)
        until_s = max(self._at_s(_POLICIES_UNTIL), time.monotonic() + least_s)
        for index, name in enumerate(names):
            _say(f"{name} decides")
            share_s = (until_s - time.monotonic()) / (len(names) - index)
            yield name, self._choice(name, self._scratch / f"policy-{index}", share_s)

    def _choice(self, name: str, folder: Path, seconds: float) -> Choice:
        bound = self._args.bound
        if name == AUTO:
            return auto_choice(self._loop, folder, bound=bound, seconds=seconds)
        tuner = PaperTuner(
            Rule(name), max_overhead=bound, profile_iterations=self._args.profile_iterations
        )
        return paper_choice(self._loop, folder, tuner, seconds=seconds)


def _key(setting: Setting) -> str:
    name, k = setting
    return f"{name} every {k}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
