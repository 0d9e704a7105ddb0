"""The zygote's client: what it says of a trainer is of that trainer alone."""

from __future__ import annotations

import sys

from tests.stops.program import Life
from tests.stops.zygote import Zygote

#: Says that two trainers start, one after the other, with one process id; only the first has ended.
_ONE_PID_TWICE = """
import sys
sys.stdin.readline()
print('{"pid": 7}', '{"pid": 7, "status": 75}', sep="\\n", flush=True)
sys.stdin.readline()
print('{"pid": 7}', flush=True)
sys.stdin.readline()
"""


def test_a_trainer_does_not_end_as_an_earlier_one_with_its_process_id() -> None:
    zygote = Zygote([sys.executable, "-c", _ONE_PID_TWICE])
    try:
        first = zygote.start(Life(folder=""))
        assert zygote.status(first, limit_s=60.0) == 75
        second = zygote.start(Life(folder=""))
        assert second == first
        assert zygote.status(second, limit_s=0.0) is None
    finally:
        zygote.close()
