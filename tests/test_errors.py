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
    StateError,
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


HOSTILE = "a\x1b]0;owned\x07\n\x7f\u202e\ud800\u2028z"


def test_no_error_commands_a_terminal_or_forges_a_line() -> None:
    found = [
        CorruptCheckpointError(HOSTILE, check=HOSTILE, expected=HOSTILE, got=HOSTILE),
        MismatchError("p", missing=[HOSTILE], unexpected=[HOSTILE], different=[HOSTILE]),
        *(kind(HOSTILE) for kind in (ConfigError, StateError, NoCheckpointError)),
        PersistError(HOSTILE, step=1, phase="commit", child_traceback=HOSTILE),
    ]
    for error in found:
        text = f"{error}{error!r}"
        assert all(c.isprintable() or c == "\n" for c in text), text
        assert r"a\x1b]0;owned\x07" in str(error)
    assert "\n" not in str(found[0])
    assert str(found[1]).count("\n") == 4
