"""What managers tell, and who is told nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq.supervisor.board import (
    NUM_BOUNDARIES,
    NUM_RECORDS,
    RECORD,
    VARIABLE,
    Board,
    State,
    open_board,
    start_of,
)
from checkfreq.supervisor.reporter import BoardReporter, Reporter, reporter_for


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    made = Board()
    monkeypatch.setenv(VARIABLE, made.address)
    yield made
    made.close()


def test_a_manager_tells_where_training_stands(board: Board, tmp_path: Path) -> None:
    reporter = reporter_for(tmp_path, rank=3)
    (record,) = board.records()
    assert (record.state, record.has_begun, record.step) == (State.MADE, False, 0)
    reporter.begin(40, restored=True)
    reporter.pass_boundary(41)
    (record,) = board.records()
    assert (record.chk_dir, record.rank, record.pid) == (str(tmp_path), 3, os.getpid())
    assert (record.restored_step, record.step) == (40, 41)
    reporter.end(State.STOPPED)
    assert board.records()[0].state is State.STOPPED


def test_the_latest_boundaries_are_timed_and_older_ones_forgotten(
    board: Board, tmp_path: Path
) -> None:
    reporter = reporter_for(tmp_path, rank=0)
    reporter.begin(0, restored=False)
    for step in range(1, NUM_BOUNDARIES + 11):
        reporter.pass_boundary(step)
    (record,) = board.records()
    assert record.step == NUM_BOUNDARIES + 10
    assert record.seconds_since(10) is None
    since = record.seconds_since(11)
    assert since is not None
    assert since > 0.0


def test_going_back_to_an_older_step_counts_from_there(board: Board, tmp_path: Path) -> None:
    reporter = reporter_for(tmp_path, rank=0)
    reporter.begin(90, restored=True)
    reporter.begin(40, restored=True)
    assert board.records()[0].step == 40


def test_each_rank_of_each_directory_has_a_record(board: Board, tmp_path: Path) -> None:
    for name in ("a", "b"):
        for rank in (0, 1):
            reporter_for(tmp_path / name, rank=rank)
    told = {(record.chk_dir, record.rank) for record in board.records()}
    assert told == {(str(tmp_path / name), rank) for name in ("a", "b") for rank in (0, 1)}


def test_a_rank_that_is_started_again_takes_its_record_over(board: Board, tmp_path: Path) -> None:
    first = reporter_for(tmp_path, rank=0)
    first.begin(0, restored=False)
    first.pass_boundary(7)
    reporter_for(tmp_path, rank=0).begin(5, restored=True)
    (record,) = board.records()
    assert (record.step, record.state) == (5, State.TRAINING)


def test_where_every_record_is_taken_nothing_is_told(board: Board, tmp_path: Path) -> None:
    for rank in range(NUM_RECORDS):
        assert isinstance(reporter_for(tmp_path, rank=rank), BoardReporter)
    assert type(reporter_for(tmp_path, rank=NUM_RECORDS)) is Reporter
    assert len(board.records()) == NUM_RECORDS


def test_a_path_that_is_too_long_is_not_told(board: Board, tmp_path: Path) -> None:
    reporter = reporter_for(Path("/" + "x" * (70 << 10)), rank=0)
    assert type(reporter) is Reporter
    assert board.records() == []


@pytest.mark.parametrize(
    "address",
    ["", ":", "/nowhere:00", "/proc/self/mem:zz", "/dev/null:00", "/dev/zero:00"],
)
def test_an_address_that_is_no_board_is_told_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    assert type(reporter_for(tmp_path, rank=0)) is Reporter


def test_another_file_at_the_address_is_not_written_to(board: Board, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert open_board(f"{path}:{board.address.rpartition(':')[2]}") is None
    assert path.read_bytes() == b"x" * 100


def test_a_board_of_another_supervisor_is_not_taken_for_ours(board: Board) -> None:
    path, _, token = board.address.rpartition(":")
    assert open_board(f"{path}:{token[::-1]}") is None


def test_a_record_that_makes_no_sense_is_left_out(board: Board, tmp_path: Path) -> None:
    reporter_for(tmp_path, rank=0)
    fd = open_board(board.address)
    assert fd is not None
    for state, path_bytes in ((77, 4), (int(State.MADE), -1), (int(State.MADE), 1 << 40)):
        os.pwrite(fd, RECORD.pack(0, 1, state, -1, path_bytes), start_of(0))
        assert board.records() == []
    os.close(fd)
