"""The comparison with peers: its arithmetic, its table, and a run of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.outcome import Round, arm_lines, target_lines
from benchmarks.compare.runs import RAW
from benchmarks.compare.table import arms, targets
from benchmarks.lab.rawio import RawWriter
from benchmarks.peers import OURS, PEERS, Peer
from tests.benchmarks.test_benchmarks_run import lines_of

#: Runs what users have beside us: large frameworks (`make test-more`).

HOW = {
    "command": "python -m benchmarks.compare",
    "commit": "abc1234",
    "machine": {"cores": 2, "accelerator": None},
    "versions": {"torch": "2.13.0", "python": "3.11", "safetensors": "0.8.0"},
}
STATE = {"device": "cpu", "gib": 1.0, "tensors": 64}
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


def test_the_first_save_has_only_figures_that_one_save_can_give() -> None:
    first = {OURS: {"held_s": 1.0, "added_s": 2.0, "iteration_s": 3.0}}
    _, line = arm_lines(FOUR[:1], [first, first], {})
    assert {name for name in line if name.startswith("first_")} == {"first_held_ms"}
    assert {"added_ms", "iteration_ms"} <= line.keys()


def test_a_failed_arm_has_its_reason_and_no_figures() -> None:
    *_, line = arm_lines([PEERS[SYNCED]], ROUNDS, {SYNCED: "OSError: full"})
    assert line == {"arm": SYNCED, "synced": True, "note": "", "failed": "OSError: full"}


def test_a_target_is_against_the_best_synced_peer_of_each_group() -> None:
    held_all, held_documented, *_ = target_lines(FOUR, ROUNDS[1:], chosen=False)
    assert (held_all["among"], held_all["best"], held_all["ratio"]) == ("all", ASIDE, 0.6)
    assert held_all["met"] is False
    assert (held_all["peers"], held_documented["peers"]) == ([SYNCED, ASIDE], [SYNCED])
    assert (held_documented["best"], held_documented["ratio"]) == (SYNCED, 0.1)
    assert held_documented["ratio_quartiles"] == [0.075, 0.125]
    assert held_documented["met"] is None  # the median is within, the upper quartile is not


def test_a_target_is_met_if_the_upper_quartile_is_within_too() -> None:
    rounds = [saves(held, 1.0, 1.0, 1.0) for held in (0.05, 0.1, 0.1)]
    assert [x["met"] for x in target_lines(FOUR, rounds, chosen=False)] == [
        True,
        True,
        False,
        False,
    ]


def test_targets_among_chosen_peers_are_called_so() -> None:
    lines = target_lines(FOUR, ROUNDS[1:], chosen=True)
    assert {line["among"] for line in lines} == {"chosen", "chosen, as documented"}


def test_as_fast_as_the_best_is_not_faster() -> None:
    lines = target_lines(FOUR, ROUNDS[1:], chosen=False)
    restores = [line for line in lines if line["target"] == "restore"]
    assert [(line["best"], line["ratio"], line["met"]) for line in restores] == [
        (SYNCED, 1.0, False),
        (SYNCED, 1.0, False),
    ]


def test_there_is_no_target_without_a_synced_peer() -> None:
    assert target_lines(FOUR[:2], ROUNDS[1:], chosen=False) == []


def printed(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**STATE, **HOW, **part} for part in parts]


ARM = {"arm": SYNCED, "synced": True, "held_ms": 2000.0, "added_ms": 1.0, "durable_s": 2.0}
RAW_LINE = {"arm": RAW, "synced": True, "durable_s": 1.0}
TARGET = {
    **{"target": "held", "among": "all", "best": SYNCED, "peers": [SYNCED, ASIDE], "ratio": 0.09},
    **{"allowed": 0.1, "ratio_quartiles": [0.08, 0.2], "met": None},
}


def test_the_table_shows_every_arm_and_target() -> None:
    lines = printed(RAW_LINE, ARM | {"ours_held": 0.1}, TARGET)
    text = arms(lines) + targets(lines)
    state = "1 GiB, 64 parameters, cpu"
    row = f"| {state} | {SYNCED} | yes | 2000.0 ms | 1 ms | 2.00 s | - | - | 0.10 | - | - |"
    assert row in text
    best = f"{SYNCED}, best of 2"
    assert f"| {state} | held, all | {best} | 0.090 | 0.080 to 0.200 | 0.1 | unsure |" in text
    assert text.index(f"| {RAW} |") < text.index(f"| {SYNCED} | yes")  # sooner durable
    assert "With safetensors 0.8.0." in text


def test_runs_do_not_mix_in_the_table() -> None:
    before = printed(RAW_LINE, ARM, ARM | {"arm": ASIDE}, TARGET | {"target": "durable"}, TARGET)
    elsewhere = [line | {"gib": 8.0} for line in printed(RAW_LINE, ARM | {"arm": LAZY})]
    after = printed(RAW_LINE, ARM | {"held_ms": 7.0}, TARGET | {"met": True})
    lines = [*before, *elsewhere, *after]
    text = arms(lines)
    assert (text.count(f"| {SYNCED} |"), text.count("7.0 ms")) == (1, 1)
    assert f"| {ASIDE} |" not in text
    assert f"| 8 GiB, 64 parameters, cpu | {LAZY} |" in text
    assert targets(lines).count("best of 2") == 1


def test_a_run_of_chosen_arms_leaves_the_verdict_on_all_where_it_is() -> None:
    chosen = printed(RAW_LINE, ARM, TARGET | {"among": "chosen", "met": True})
    text = targets([*printed(RAW_LINE, ARM, TARGET), *chosen])
    assert [row.count("| unsure |") for row in text.splitlines() if "held" in row] == [1, 0]


def test_the_table_shows_failed_arms_last() -> None:
    failed = {"arm": LAZY, "synced": True, "failed": "OSError: a|b"}
    text = arms(printed(RAW_LINE, failed, ARM))
    assert f"| {LAZY} (failed: OSError: a/b) | yes | - |" in text
    assert text.index(LAZY + " (failed") > text.index(f"| {SYNCED} | yes")


def test_the_raw_disk_is_read_into_the_memory_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    with RawWriter(path, 10_000, chunk_bytes=4096) as writer:
        writer.once()
        other = bytes(range(256)) * (path.stat().st_size // 256)
        path.write_bytes(other)
        writer.read_back(fresh=True)
        writer.once()
        assert path.read_bytes() != other  # that went to other memory
        path.write_bytes(other)
        writer.read_back()
        writer.once()
        assert path.read_bytes() == other


def test_a_raw_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    with RawWriter(tmp_path / "raw", 8192) as writer:
        writer.once()
        os_truncate(tmp_path / "raw", 4096)
        with pytest.raises(EOFError, match="4096 bytes early"):
            writer.read_back()


def os_truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


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
