"""One checkpoint of ours beside one of every peer: time held, time to durable, time to restore.

    python -m benchmarks.compare --gib 1 --rounds 3 --folder /mnt/disk/scratch

The state is ``--gib`` of parameters and AdamW's moments in ``--tensors`` parameters. In each
round every arm saves once, in random order, while training goes on (matrix products of
``--iteration-s``, then a write to all of the state) until that save is durable. Then the arms that
read in different ways restore what they saved last, in ``--restores`` rounds. The first save, which
pays for start-up, is told apart and left out; all else are medians and quartiles.

``held_ms``: the training thread stands still in calls of the library: the save (alone:
``save_ms``), boundaries, entering the weight update. ``added_ms``: what the iterations until the
save was durable took longer in all. ``durable_s``: from the call's entry until everything is on
disk; ``persist_s`` (ours): that part behind the complete snapshot. An arm that does not sync
(``synced`` false) calls durable what it has written: compare it with such arms only. Where a peer
has a background its files are synced there. ``restore_s``: into the live training, its files
dropped from the page cache; ``warm_restore_s``: straight after the last save, in the cache or not,
as the write left them. Ours verifies every digest, the others verify nothing. What a process makes
once before it restores (manager, trainer, process group) is made before; ours still waits in its
restore for the worker that the manager has started.

``raw`` writes, and reads into memory that is there, as many bytes directly with four threads;
``fresh_restore_s`` reads into new memory, as most restores must. Ratios are taken within a round:
``ours_*`` is ours divided by the arm's, ``against_raw_*`` the raw disk's divided by the arm's.
A line per target says how ours stands against the best synced peer: ``among`` ``all`` of them, or
those ``as documented``, without DCP's staging aside.

Needs about 12 times the state in memory with all arms; fewer (``--arms``) need less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import OURS, PEERS, Peer, Saver, Training, installed
from benchmarks.rawio import RawWriter, drop_from_cache
from benchmarks.record import emit, run
from benchmarks.saving import Work, sample, seconds_of
from benchmarks.states import adamw_training, num_steps, write_to_all

RAW = "raw"
_RECENT = 9  # clean iterations, over arms, that say how long one takes now

#: Ours may take at most so much of the best peer's figure.
TARGETS = {"held_s": 0.1, "durable_s": 0.5, "restore_s": 1.0}

#: Seconds by figure by arm, of one round.
Round = dict[str, dict[str, float]]
Calls = dict[str, Callable[[], dict[str, float]]]


def main() -> None:
    """Print a line per arm and a line per target."""
    args = _arguments()
    peers = list(installed(args.arms).values())
    rounds = measure(peers, args)
    about = {
        "device": args.device,
        "gib": args.gib,
        "tensors": args.tensors,
        "rounds": args.rounds,
        "restores": args.restores,
    }
    packages = sorted({package for peer in peers for package in peer.packages})
    for fields in [*arm_lines(peers, rounds), *target_lines(peers, rounds[1:])]:
        emit("compare", folder=Path(args.folder), packages=packages, **about, **fields)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--tensors", type=int, default=64, help="parameters")
    parser.add_argument("--rounds", type=int, default=3, help="behind the first one")
    parser.add_argument("--restores", type=int, default=3, help="rounds of restores")
    parser.add_argument("--arms", nargs="+", choices=PEERS, help="default: all installed ones")
    parser.add_argument("--iteration-s", type=float, default=0.25, help="of computing, about")
    parser.add_argument("--device", default=device)
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    return parser.parse_args()


# Measuring


@dataclass(slots=True)
class Arm:
    """A peer at work on the training that all share; ``recent_s`` are its clean iterations."""

    peer: Peer
    saver: Saver
    training: Training
    work: Work
    recent_s: deque[float]
    saved_steps: int = 0

    @property
    def restores(self) -> bool:
        """Whether no other arm reads the same files in the same way."""
        return not self.peer.restores_as

    def save(self, *, restores: bool) -> dict[str, float]:
        """One save, and how it is restored straight after."""
        self.saved_steps = num_steps(self.training) + 1  # one clean iteration
        figures = sample(
            self.saver, self._change, self.work, clean_iterations=1, recent_s=self.recent_s
        )
        figures["iteration_s"] = statistics.median(self.recent_s)
        return figures | ({"warm_restore_s": self._restored()} if restores else {})

    def restore(self) -> dict[str, float]:
        """What the last save takes to come back from the disk."""
        drop_from_cache(self.saver.files())
        return {"restore_s": self._restored()}

    def _restored(self) -> float:
        self._change()
        self.saver.prepare_restore()
        seconds = seconds_of(self.saver.restore, self.work)
        assert num_steps(self.training) == self.saved_steps, "another state came back"
        return seconds

    def _change(self) -> None:
        write_to_all(self.training)


def measure(peers: Sequence[Peer], args: argparse.Namespace) -> list[Round]:
    """All rounds, the first one included, those of restores behind those of saves."""
    device, num_bytes = torch.device(args.device), int(args.gib * 2**30)
    training = adamw_training(num_bytes, num_tensors=args.tensors, device=device)
    work = Work(args.iteration_s, device=device)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="compare-") as scratch:
        recent_s: deque[float] = deque(maxlen=_RECENT)
        arms = [
            Arm(
                peer, peer.make(Path(scratch) / slug(peer.name), training), training, work, recent_s
            )
            for peer in peers
        ]
        with RawWriter(Path(scratch) / RAW, num_bytes) as writer:
            rounds = saving(arms, writer, rounds=args.rounds)
            for arm in arms:
                if not arm.restores:
                    arm.saver.close()
            arms = [arm for arm in arms if arm.restores]
            rounds += restoring(arms, writer, rounds=args.restores)
        for arm in arms:
            arm.saver.close()
    return rounds


def saving(arms: Sequence[Arm], writer: RawWriter, *, rounds: int) -> list[Round]:
    """The first round and ``rounds`` more; restores straight after saves are in the last."""
    measured = []
    for index in range(rounds + 1):
        calls: Calls = {RAW: lambda: {"durable_s": writer.once()}}
        for arm in arms:
            if index or arm.peer.synced:  # what starts up is the same in both of a peer
                restores = arm.restores and index == rounds
                calls[arm.peer.name] = partial(arm.save, restores=restores)
        measured.append(one_round(calls, f"save {index}", order=random.Random(index)))
    return measured


def restoring(arms: Sequence[Arm], writer: RawWriter, *, rounds: int) -> list[Round]:
    """Each of them, and the raw disk."""
    calls: Calls = {RAW: lambda: _read_back(writer)}
    calls |= {arm.peer.name: arm.restore for arm in arms}
    return [
        one_round(calls, f"restore {index}", order=random.Random(index)) for index in range(rounds)
    ]


def _read_back(writer: RawWriter) -> dict[str, float]:
    return {"restore_s": writer.read_back(), "fresh_restore_s": writer.read_back(fresh=True)}


def one_round(calls: Calls, title: str, *, order: random.Random) -> Round:
    """Every arm once, in random order; progress goes to standard error."""
    measured = {}
    for name in order.sample(list(calls), len(calls)):
        figures = measured[name] = calls[name]()
        shown = ", ".join(f"{figure[:-2]} {value:.3f} s" for figure, value in figures.items())
        print(f"{title}, {name}: {shown}", file=sys.stderr)
    return measured


def slug(name: str) -> str:
    """A folder's name."""
    return name.replace(", ", "-").replace(" ", "-")


# Reporting


def arm_lines(peers: Sequence[Peer], rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """What is told of each arm; ``rounds`` begin with the one that is left out."""
    first, *rest = rounds
    about = {peer.name: {"synced": peer.synced, "note": peer.note} for peer in peers}
    return [
        {
            "arm": name,
            **about.get(name, {"synced": True, "note": ""}),
            **_shown({f"first_{figure}": [value] for figure, value in first.get(name, {}).items()}),
            **_shown(figures_of(rest, name)),
            **_ratios("ours", rest, OURS, name),
            **_ratios("against_raw", rest, RAW, name),
        }
        for name in (RAW, *about)
    ]


def figures_of(rounds: Sequence[Round], arm: str) -> dict[str, list[float]]:
    """Every figure of an arm in the rounds that have it."""
    figures: dict[str, list[float]] = {}
    for each in rounds:
        for figure, value in each.get(arm, {}).items():
            figures.setdefault(figure, []).append(value)
    return figures


def ratios_of(rounds: Sequence[Round], above: str, below: str, figure: str) -> list[float]:
    """One arm's figure divided by another's, in the rounds in which both have it."""
    both = ((each.get(above, {}), each.get(below, {})) for each in rounds)
    return [one[figure] / other[figure] for one, other in both if figure in one and figure in other]


def _ratios(prefix: str, rounds: Sequence[Round], above: str, below: str) -> dict[str, float]:
    found = {figure: ratios_of(rounds, above, below, figure) for figure in TARGETS}
    return {
        f"{prefix}_{figure.removesuffix('_s')}": round(statistics.median(ratios), 4)
        for figure, ratios in found.items()
        if ratios
    }


#: What holds training is told in milliseconds.
_HOLDS = ("held_s", "save_s", "added_s", "iteration_s")


def _shown(figures: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and, of more than one value, quartiles."""
    shown: dict[str, Any] = {}
    for figure, values in figures.items():
        name, scale, digits = figure, 1.0, 4
        if figure.endswith(_HOLDS):
            name, scale, digits = f"{figure.removesuffix('_s')}_ms", 1e3, 2
        shown[name] = round(statistics.median(values) * scale, digits)
        if len(values) > 1:
            low, high = quartiles(values)
            shown[f"{name}_quartiles"] = [round(low * scale, digits), round(high * scale, digits)]
    return shown


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of one value that itself."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def target_lines(peers: Sequence[Peer], rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Ours against the best synced peer, for each target in each group."""
    synced = [peer for peer in peers if peer.synced and peer.name != OURS]
    groups = {
        "all": [peer.name for peer in synced],
        "as documented": [peer.name for peer in synced if not peer.note],
    }
    found = (
        _target(figure, among, names, rounds)
        for figure in TARGETS
        for among, names in groups.items()
    )
    return [line for line in found if line is not None]


def _target(
    figure: str, among: str, names: Sequence[str], rounds: Sequence[Round]
) -> dict[str, Any] | None:
    medians = {
        name: statistics.median(values)
        for name in names
        if (values := figures_of(rounds, name).get(figure))
    }
    if not medians:
        return None
    best = min(medians, key=lambda name: medians[name])
    ratios = ratios_of(rounds, OURS, best, figure)
    ratio, allowed = statistics.median(ratios), TARGETS[figure]
    return {
        "target": figure.removesuffix("_s"),
        "among": among,
        "best": best,
        "ratio": round(ratio, 4),
        "ratio_quartiles": [round(one, 4) for one in quartiles(ratios)],
        "allowed": allowed,
        "met": ratio <= allowed if allowed < 1 else ratio < allowed,
    }


if __name__ == "__main__":
    run(main)
