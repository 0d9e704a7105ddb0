"""What managers tell, and who is told nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq.supervisor.board import (
    NUM_BOUNDARIES,
    NUM_RECORDS,
    VARIABLE,
    Board,
    State,
    open_board,
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
    reporter.begin(90, restored=True)
    reporter.begin(40, restored=True)  # an older step
    assert board.records()[0].step == 40
    for step in range(41, 40 + NUM_BOUNDARIES + 11):
        reporter.pass_boundary(step)
    (record,) = board.records()
    assert (record.chk_dir, record.rank, record.pid) == (str(tmp_path), 3, os.getpid())
    assert (record.restored_step, record.step) == (40, 40 + NUM_BOUNDARIES + 10)
    assert record.seconds_since(50) is None, "older boundaries are forgotten"
    assert (record.seconds_since(51) or 0.0) > 0.0
    reporter.end(State.STOPPED)
    assert board.records()[0].state is State.STOPPED


def test_each_rank_of_each_directory_has_a_record_which_its_successor_takes_over(
    board: Board, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        for rank in (0, 1):
            reporter_for(tmp_path / name, rank=rank).begin(7, restored=False)
    reporter_for(tmp_path / "b", rank=1).begin(5, restored=True)
    told = {(record.chk_dir, record.rank): record.step for record in board.records()}
    steps = {(str(tmp_path / name), rank): 7 for name in ("a", "b") for rank in (0, 1)}
    assert told == {**steps, (str(tmp_path / "b"), 1): 5}
    assert {record.state for record in board.records()} == {State.TRAINING}


def test_where_every_record_is_taken_or_a_path_is_too_long_nothing_is_told(
    board: Board, tmp_path: Path
) -> None:
    assert type(reporter_for(Path("/" + "x" * (70 << 10)), rank=0)) is Reporter
    assert board.records() == []
    for rank in range(NUM_RECORDS):
        assert isinstance(reporter_for(tmp_path, rank=rank), BoardReporter)
    assert type(reporter_for(tmp_path, rank=NUM_RECORDS)) is Reporter
    assert len(board.records()) == NUM_RECORDS


@pytest.mark.parametrize("address", ["", ":", "/nowhere:00", "/dev/null:00", "/dev/zero:00"])
def test_an_address_that_is_no_board_is_told_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    assert type(reporter_for(tmp_path, rank=0)) is Reporter


def test_another_file_at_the_address_is_not_written_to(board: Board, tmp_path: Path) -> None:
    path, _, token = board.address.rpartition(":")
    assert open_board(f"{path}:{token[::-1]}") is None
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert open_board(f"{file}:{token}") is None
    assert file.read_bytes() == b"x" * 100
