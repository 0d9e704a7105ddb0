"""Errors go from rank to rank and from process to process."""

from __future__ import annotations

import pickle

import pytest

from checkfreq.errors import (
    CheckFreqError,
    ConfigError,
    CorruptCheckpointError,
    MismatchError,
    NoCheckpointError,
    PersistError,
    RankError,
)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a"),
        NoCheckpointError("nothing there"),
        CorruptCheckpointError("chk/x", check="digest", expected="1", got="2"),
        PersistError("b", step=3, phase="write", child_traceback="Traceback"),
        MismatchError("chk", missing=["a"], different=["b"]),
        RankError("c", ranks=(1, 3), phase="parts"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_after_pickling(error: CheckFreqError) -> None:
    error.add_note("a hint")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
