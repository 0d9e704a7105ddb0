"""Scale: arithmetic of its figures, what limits are measured with, and toy runs to the end."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import mmap
import os
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lab.capacity import shortage
from benchmarks.lab.rawio import RawWriter, incompressible
from benchmarks.lab.results import lines_of
from benchmarks.lab.tables import tables_of
from benchmarks.limits.measure import Limits
from benchmarks.peers.ours import CheckFreq
from benchmarks.plots import draw_all
from benchmarks.scale import measure as scale
from benchmarks.scale.bus import Bus
from benchmarks.scale.measure import figures, num_rounds, quiet_batches
from benchmarks.scale.peak import Peak
from benchmarks.scale.table import TABLES
from tests.benchmarks.test_benchmarks_run import lines_of as printed_by
from tests.benchmarks.test_goodput import HOW, write

#: Runs what users have beside us: large frameworks (`make test-more`).

MIB = 2**20
CPU = torch.device("cpu")

SECONDS = {
    "held_s": [0.5, 0.002, 0.004, 0.006],
    "save_s": [0.5, 0.001, 0.001, 0.001],
    "added_s": [0.5, 0.01, 0.02, 0.03],
    "durable_s": [9.0, 2.0, 4.0, 8.0],
    "persist_s": [8.0, 1.0, 2.0, 4.0],
    "copy_s": [1.0, 0.5, 0.5, 0.25],
    "raw_write_s": [7.0, 1.0, 1.0, 1.0],
    "bus_s": [7.0, 0.25, 0.25, 0.25],
    "restore_s": [2.0, 4.0, 6.0],
    "raw_read_s": [1.0, 1.0, 1.0],
    "raw_fresh_s": [2.0, 2.0, 2.0],
}


def touched(num_bytes: int) -> memoryview:
    """Memory that is there, gone with its last view."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(-1, num_bytes, flags=flags))


# Arithmetic


def test_medians_exclude_the_first_save_which_is_reported_separately() -> None:
    found = figures(SECONDS)
    assert found["held_ms"] == 4.0
    assert found["durable_s"] == 4.0
    assert (found["first_held_ms"], found["first_durable_s"]) == (500.0, 9.0)
    assert found["restore_s"] == 4.0  # of all rounds: a restore has no first


def test_ratios_are_the_limits_time_over_ours_within_a_round() -> None:
    found = figures(SECONDS)
    assert found["persist_against_raw"] == 0.5
    assert found["durable_against_raw"] == 0.25
    assert found["copy_against_bus"] == 0.5
    assert found["restore_against_raw"] == 0.25
    assert found["restore_against_fresh"] == 0.5


def test_quartiles_are_in_the_units_of_the_medians() -> None:
    found = figures(SECONDS)
    assert (found["low"]["held_ms"], found["high"]["held_ms"]) == (3.0, 5.0)
    assert (found["low"]["restore_s"], found["high"]["restore_s"]) == (3.0, 5.0)


class Counted:
    """Batches of which some begin a checkpoint; each gives its number."""

    def __init__(self, *begins: bool) -> None:
        self._begins = iter(begins)
        self.num_batches = self.num_begun = 0

    def batch(self) -> float:
        self.num_batches += 1
        self.num_begun += next(self._begins)
        return self.num_batches


def quiet(*begins: bool, wanted: int, most: int) -> list[float]:
    of = Counted(*begins)
    return quiet_batches(of.batch, lambda: of.num_begun, wanted=wanted, most=most)


def test_a_batch_in_which_a_checkpoint_began_does_not_count() -> None:
    assert quiet(True, False, True, False, wanted=2, most=9) == [2, 4]


def test_batches_are_not_waited_for_without_end() -> None:
    assert quiet(True, True, False, True, wanted=2, most=4) == [3]
    assert quiet(True, True, wanted=2, most=2) == []


@pytest.mark.parametrize(
    ("asked", "gib", "rounds"), [(4, 0.1, 4), (4, 1, 4), (4, 2, 2), (4, 8, 2), (1, 8, 1), (6, 2, 3)]
)
def test_large_states_have_fewer_rounds_but_two(asked: int, gib: float, rounds: int) -> None:
    assert num_rounds(asked, gib) == rounds


# Limits


def test_a_raw_write_of_little_data_over_and_over_has_the_full_length(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "raw", 3 * MIB + 4096
    with RawWriter(path, num_bytes, chunk_bytes=MIB, source_bytes=MIB + 1) as writer:
        writer.once()
        data = path.read_bytes()
    assert len(data) == num_bytes
    assert data[: 2 * MIB] != bytes(2 * MIB)
    assert data[2 * MIB :] == data[: num_bytes - 2 * MIB]


def test_a_raw_write_without_a_limit_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    with RawWriter(path, 2 * MIB, chunk_bytes=MIB) as writer:
        writer.once()
        data = path.read_bytes()
    assert data[:MIB] != data[MIB:]


def test_a_repeated_source_is_read_back_into_its_own_memory(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "raw", 3 * MIB + 4096
    with RawWriter(path, num_bytes, threads=1, chunk_bytes=MIB, source_bytes=MIB) as writer:
        writer.once()
        path.write_bytes(b"a" * 3 * MIB + b"b" * 4096)
        assert writer.read_back() > 0
        source = bytes(writer._source)
    assert source == b"b" * 4096 + b"a" * (MIB - 4096)


def test_reading_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    with RawWriter(tmp_path / "raw", 2 * MIB, source_bytes=MIB, chunk_bytes=MIB) as writer:
        writer.once()
        os.truncate(tmp_path / "raw", MIB)
        with pytest.raises(EOFError):
            writer.read_back(fresh=True)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="none here")
def test_the_raw_disk_is_given_private_huge_pages(tmp_path: Path) -> None:
    with RawWriter(tmp_path / "raw", 4 * MIB) as writer:
        address = ctypes.addressof(ctypes.c_char.from_buffer(writer._source))
        gc.collect()  # that view
        permissions, flags = mapping_at(address)
    assert permissions.endswith("p")
    assert "hg" in flags


def mapping_at(address: int) -> tuple[str, list[str]]:
    """What the kernel says of this process's memory there: permissions and flags."""
    permissions = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            permissions = rest[0] if start <= address < end else ""
        elif first == "VmFlags:" and permissions:
            return permissions, rest
    raise LookupError(f"nothing is at {address:x}")


def test_the_limits_use_incompressible_data() -> None:
    memory = incompressible(9 * MIB)
    data = bytes(memory)
    assert len(data) == 9 * MIB
    assert len(zlib.compress(data, 1)) > 9 * MIB


@pytest.mark.parametrize("num_bytes", [2 * MIB + 4096, MIB, 100])
def test_the_bus_copies_everything_in_pieces_of_its_region(num_bytes: int) -> None:
    bus, copied = Bus(MIB, CPU), Copied()
    bus._state = torch.randint(256, (MIB,), dtype=torch.uint8)
    bus._host = torch.zeros(MIB, dtype=torch.uint8)
    with copied:
        assert bus.seconds(num_bytes).keys() == {"bus_s"}
    assert sum(copied.sizes) == num_bytes
    length = min(num_bytes, MIB)
    assert torch.equal(bus._host[:length], bus._state[:length])
    assert not bus._host[length:].any()


class Copied(TorchDispatchMode):
    """Bytes of each copy that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_a_limit_is_not_read_from_a_file_that_ends_early(tmp_path: Path) -> None:
    arms = Limits(tmp_path / "file", 2 * MIB).arms()
    arms["write, page cache"]()
    assert arms["read, page cache"]() > 0
    os.truncate(tmp_path / "file", MIB)
    with pytest.raises(EOFError):
        arms["read, page cache"]()


def test_a_peak_is_seen_after_its_memory_is_gone() -> None:
    peak = Peak()
    touched(64 * MIB).release()
    if not peak._is_exact:
        pytest.skip("this kernel's peak cannot be set back")
    assert peak.growth() >= 60 * MIB


def test_where_the_peak_cannot_be_reset_the_largest_sample_counts(tmp_path: Path) -> None:
    peak = Peak(clear=tmp_path / "not" / "there")
    memory = touched(64 * MIB)
    peak.sample()
    memory.release()
    del memory
    touched(128 * MIB).release()
    assert 60 * MIB <= peak.growth() < 120 * MIB


def test_a_state_that_does_not_fit_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    assert shortage(MIB, CPU, tmp_path) is None
    why_not = shortage(2**50, CPU, tmp_path)
    assert why_not is not None
    assert why_not.startswith("needs 3250586.6 GiB of memory, and ")


# Toy runs


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("scale")
    small = ("--gib", "0.01", "1000000", "--tensors", "10", "--mib", "1", "--rounds", "1")
    small = (*small, "--lists", "99")
    found = printed_by("scale", *small, "--iterations", "20", folder=folder)
    assert {path.name for path in folder.iterdir()} == {"stdout"}, "scratch was left"
    return found


def test_it_prints_a_line_per_size_and_number_of_tensors(lines: list[dict[str, Any]]) -> None:
    assert [(line["what"], line.get("gib"), line.get("tensors")) for line in lines] == [
        ("size", 0.01, 64),
        ("size", 1_000_000.0, None),
        ("tensors", None, 10),
        ("list", None, None),
        ("list", None, None),
    ]
    measured = [line for line in lines if "why_not" not in line and line["what"] != "list"]
    assert all(SECONDS.keys() - {"held_s", "save_s", "added_s"} <= line.keys() for line in measured)
    assert all(line["storage"] for line in lines)
    assert measured[1]["boundary_us_low"] <= measured[1]["boundary_us"]


def test_memory_holds_two_slots_and_the_worker(lines: list[dict[str, Any]]) -> None:
    line = lines[0]
    assert line["slots_gib"] == pytest.approx(0.02, rel=0.01)
    assert line["worker_gib"] > 0
    assert line["memory_gib"] == pytest.approx(line["trainer_gib"] + line["worker_gib"], abs=2e-4)
    assert line["memory_gib"] > line["slots_gib"]


def test_a_toy_run_makes_both_tables_and_the_plot(
    lines: list[dict[str, Any]], tmp_path: Path
) -> None:
    write(tmp_path, *lines)
    sizes, tensors = tables_of(lines_of("scale", tmp_path), TABLES)
    assert "| 0.01 GiB, cpu | " in sizes
    assert "1e+06 GiB, cpu: not measured, it needs " in sizes
    assert "| 10 in 1 MiB, cpu | " in tensors
    if importlib.util.find_spec("matplotlib") is not None:
        (first,) = draw_all(results=tmp_path, out=tmp_path / "1")
        (second,) = draw_all(results=tmp_path, out=tmp_path / "2")
        assert first.read_text() == second.read_text()
        assert "raw read, new memory" in first.read_text()


def test_the_newest_line_of_a_size_counts(tmp_path: Path) -> None:
    old = {"benchmark": "scale", "what": "size", "device": "cpu", "gib": 8.0, **HOW}
    write(tmp_path, {**old, "why_not": "was too large"}, {**old, "why_not": "is too large"})
    (table,) = tables_of(lines_of("scale", tmp_path), TABLES)
    assert "8 GiB, cpu: not measured, it is too large." in table
    assert "was" not in table.rpartition("8 GiB")[2]


def test_a_different_disk_has_its_own_row_and_label(tmp_path: Path) -> None:
    line = {"benchmark": "scale", "what": "size", "device": "cpu", "gib": 8.0, **HOW}
    here, there = ({**line, "storage": f"ext4 on {disk}"} for disk in ("vda", "nvme0n1"))
    write(tmp_path, {**here, "why_not": "is too large"}, {**there, "why_not": "is huge"})
    (table,) = tables_of(lines_of("scale", tmp_path), TABLES)
    assert "8 GiB, cpu, ext4 on vda: not measured, it is too large." in table
    assert "8 GiB, cpu, ext4 on nvme0n1: not measured, it is huge." in table


@pytest.mark.parametrize("part", ["first", "later"])
def test_a_saver_is_closed_when_measuring_fails(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_savers: list[object] = []
    make, close = CheckFreq.__init__, CheckFreq.close

    def made(saver: CheckFreq, *given: Any) -> None:
        open_savers.append(saver)
        make(saver, *given)

    def closed(saver: CheckFreq) -> None:
        open_savers.remove(saver)
        close(saver)

    def fail(*_: object, **__: object) -> float:
        raise OSError("the disk is gone")

    monkeypatch.setattr(CheckFreq, "__init__", made)
    monkeypatch.setattr(CheckFreq, "close", closed)
    monkeypatch.setattr(scale, "sample" if part == "first" else "seconds_of", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        scale.measured(MIB, 4, 1, CPU, Namespace(folder=tmp_path))
    assert not open_savers
    assert not list(tmp_path.iterdir())
