"""The comparison with peers: its arithmetic, its table, and a run of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.compare.measure import measure
from benchmarks.compare.outcome import Round, arm_lines, target_lines
from benchmarks.compare.runs import RAW
from benchmarks.peers import OURS, PEERS, Peer, Saver, Training
from benchmarks.peers.folders import InFolders
from benchmarks.peers.torch_files import TorchSave
from tests.benchmarks.test_benchmarks_run import lines_of

SYNCED, LAZY, ASIDE = "torch.save, synced", "torch.save", "dcp.async_save, thread, aside"
FOUR: list[Peer] = [PEERS[name] for name in (OURS, LAZY, SYNCED, ASIDE)]


def saves(ours: float, lazy: float, synced: float, aside: float) -> Round:
    held = dict(zip((OURS, LAZY, SYNCED, ASIDE), (ours, lazy, synced, aside), strict=True))
    figures = {name: {"held_s": value, "durable_s": 2.0} for name, value in held.items()}
    return {RAW: {"durable_s": 1.0}, **figures}


ROUNDS = [
    saves(9.0, 9.0, 9.0, 9.0),  # start-up: left out
    saves(0.1, 0.01, 1.0, 0.4),
    saves(0.3, 0.01, 2.0, 0.5),
    saves(0.2, 0.01, 4.0, 0.2),
    {RAW: {"restore_s": 1.0}, OURS: {"restore_s": 2.0}, SYNCED: {"restore_s": 2.0}},
]


def test_an_arm_has_medians_quartiles_and_ratios_within_rounds() -> None:
    lines = {line["arm"]: line for line in arm_lines(FOUR, ROUNDS, {})}
    assert list(lines) == [RAW, OURS, LAZY, SYNCED, ASIDE]
    synced = lines[SYNCED]
    assert (synced["held_ms"], synced["held_ms_quartiles"]) == (2000.0, [1500.0, 3000.0])
    assert synced["first_held_ms"] == 9000.0
    assert synced["ours_held"] == 0.1  # of 0.1, 0.15 and 0.05, not 0.2 / 2
    assert synced["against_raw_durable"] == 0.5
    assert (synced["restore_s"], synced["ours_restore"]) == (2.0, 1.0)
    assert "restore_s" not in lines[ASIDE]
    assert [lines[name]["synced"] for name in (RAW, LAZY, SYNCED)] == [True, False, True]


def test_a_target_is_against_the_best_synced_peer_of_each_group() -> None:
    held_all, held_documented, *_ = target_lines(FOUR, ROUNDS[1:], chosen=False)
    assert (held_all["among"], held_all["best"], held_all["ratio"]) == ("all", ASIDE, 0.6)
    assert held_all["met"] is False
    assert (held_all["peers"], held_documented["peers"]) == ([SYNCED, ASIDE], [SYNCED])
    assert (held_documented["best"], held_documented["ratio"]) == (SYNCED, 0.1)
    assert held_documented["ratio_quartiles"] == [0.075, 0.125]
    assert held_documented["met"] is None  # the median is within, the upper quartile is not


def test_it_prints_a_line_per_arm_and_per_target(tmp_path: Path) -> None:
    small = ("--gib", "0.001", "--tensors", "2", "--rounds", "1", "--iteration-s", "0.001")
    arms = (LAZY, SYNCED, ASIDE, "dcp.save")
    options = (*small, "--restores", "2", "--device", "cpu", "--arms", *arms)
    lines = lines_of("compare", *options, folder=tmp_path)
    by_arm = {line["arm"]: line for line in lines if "arm" in line}
    assert by_arm.keys() == {RAW, OURS, *arms}
    common = {"held_ms", "save_ms", "added_ms", "durable_s", "iteration_ms", "ours_held"}
    assert all(common <= by_arm[arm].keys() for arm in arms)
    restored = {arm for arm, line in by_arm.items() if "restore_s" in line}
    assert restored == {RAW, OURS, SYNCED, "dcp.save"}
    assert {arm for arm, line in by_arm.items() if "warm_restore_s" in line} == restored - {RAW}
    assert "persist_s" in by_arm[OURS]
    targets = {(line["target"], line["among"]) for line in lines if "target" in line}
    among = ("chosen", "chosen, as documented")
    assert targets == {(what, who) for what in ("held", "durable", "restore") for who in among}
    assert all(line["threads"] > 0 for line in lines)
    assert {path.name for path in tmp_path.iterdir()} == {"stdout"}


class Forgets(TorchSave):
    """Brings everything back but a moment of the last parameter."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._live = training

    def load(self, folder: Path) -> None:
        super().load(folder)
        *_, last = self._live.model.parameters()
        self._live.optimizer.state[last]["exp_avg_sq"][-1] += 1.0


def test_an_arm_that_restores_a_different_state_has_failed(tmp_path: Path) -> None:
    def make(folder: Path, training: Training) -> Saver:
        return InFolders(folder, Forgets(training), sync=False)

    small = {"gib": 1e-5, "tensors": 2, "rounds": 1, "restores": 2, "iteration_s": 1e-4}
    options = argparse.Namespace(**small, device="cpu", folder=str(tmp_path))
    _, failed = measure([Peer("one", make, (), synced=True)], options)
    assert failed == {"one": "ValueError: the restored state differs from the saved one"}
