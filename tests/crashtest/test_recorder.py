"""What fails in the recorder is told in the record, and does not reach the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkfreq.crashtest.history import read
from checkfreq.crashtest.plan import Plan
from checkfreq.crashtest.recorder import Recorder
from checkfreq.state.checkpoint import CFCheckpoint


class Unreadable:
    """Its state cannot be read now."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("between two phases")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_an_object_that_cannot_be_read_does_not_end_the_record(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path), Plan(home=str(tmp_path / "home")))
    chk = CFCheckpoint(meter=Unreadable(), other={"number": 1})
    recorder.attach(chk, rank=0, save=lambda **_: None)
    recorder.begin(0)
    recorder.pass_boundary(1)
    record = read(tmp_path)[0]
    found = record.at(1)
    assert found is not None
    assert found[1]["meter"] == "cannot be read: RuntimeError"
    assert found[1]["other.number"] == "1"
    assert not record.failures
