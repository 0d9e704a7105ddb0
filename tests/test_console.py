"""What is on standard error, by how the script set logging up; in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = """
import logging, resource, sys
import torch
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
{setup}

def run(**settings):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    manager = CFManager(sys.argv[1], chk, config=CFConfig(nice=0), **settings)
    manager.restore()
    while manager.stats()["interval_steps"] is None or manager.stats()["num_committed"] < 3:
        for _ in range(20):
            torch.ones(300, 300) @ torch.ones(300, 300)
        model(torch.ones(1, 4)).sum().backward()
        manager.weight_update()
        optimizer.zero_grad()
        manager.step()
    manager.wait()
    return manager

run(max_overhead=0.5).close()
manager = run(mode=CFMode.MANUAL, chk_freq=1)
worker = manager._persistence._client._process.pid
resource.prlimit(worker, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
manager.weight_update()
manager.step()
manager.wait()
resource.prlimit(worker, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
manager.close()
"""


def errors_of(program: str, *words: str) -> str:
    """What a Python program writes to standard error."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def test_without_a_logging_setup_the_lines_that_matter_are_shown_once(tmp_path: Path) -> None:
    said = errors_of(TRAINING.format(setup=""), str(tmp_path / "chk"))
    assert said.count("checkfreq: checkpoint of step") == 2  # the first of each run
    assert said.count("checkfreq: restored step") == 1
    assert "checkfreq: checkpoints every" in said
    assert said.count("failed (1 in a row)") == 1
    assert said.count("durable again") == 1


def test_a_restore_is_shown_beside_a_logging_setup_for_warnings(tmp_path: Path) -> None:
    setup = "logging.basicConfig(level=logging.WARNING, format='%(message)s')"
    said = errors_of(TRAINING.format(setup=setup), str(tmp_path / "chk"))
    assert said.count("checkfreq: ") == said.count("checkfreq: restored step") == 1


def test_with_a_logging_setup_every_line_is_shown_by_that_alone(tmp_path: Path) -> None:
    setup = "logging.basicConfig(level=logging.INFO, format='%(message)s')"
    said = errors_of(TRAINING.format(setup=setup), str(tmp_path / "chk"))
    assert "checkfreq: " not in said
    assert said.count("restored step") == 1
    assert said.count("checkpoint of step") >= 6
    assert said.count("failed (1 in a row)") == 1


LINE = """
import logging, sys
from checkfreq.console import say
{setup}
say(logging.getLogger("checkfreq.manager"), "restored step %d", 5{vital})
"""
VITAL = ", is_vital=True"
SHOWN = {
    "nothing": "",
    "a level that lets it through": "logging.getLogger('checkfreq').setLevel(logging.INFO)",
    "a root level that lets it through": "logging.getLogger().setLevel(logging.DEBUG)",
}
SHOWN_IF_VITAL = {
    "basicConfig at its default level": "logging.basicConfig()",
    "a level of the root": "logging.getLogger().setLevel(logging.ERROR)",
    "a handler elsewhere": "logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))",
}
NOT_SHOWN = {
    "logging.disable": "logging.disable(logging.INFO)",
    "a level of ours": "logging.getLogger('checkfreq').setLevel(logging.WARNING)",
    "a null handler": "logging.getLogger('checkfreq').addHandler(logging.NullHandler())",
    "no last resort": "logging.lastResort = None",
    "no standard error": "sys.stderr = None",
}


@pytest.mark.parametrize("setup", SHOWN.values(), ids=SHOWN.keys())
def test_a_line_is_printed_where_no_handler_would_show_it(setup: str) -> None:
    assert errors_of(LINE.format(setup=setup, vital="")) == "checkfreq: restored step 5\n"


@pytest.mark.parametrize("setup", SHOWN_IF_VITAL.values(), ids=SHOWN_IF_VITAL.keys())
def test_a_root_logger_that_was_set_up_hides_a_line_unless_it_is_vital(setup: str) -> None:
    assert errors_of(LINE.format(setup=setup, vital="")) == ""
    assert errors_of(LINE.format(setup=setup, vital=VITAL)) == "checkfreq: restored step 5\n"


@pytest.mark.parametrize("vital", ["", VITAL], ids=["", "vital"])
@pytest.mark.parametrize("setup", NOT_SHOWN.values(), ids=NOT_SHOWN.keys())
def test_a_line_is_not_printed_where_logging_of_ours_was_set_up(setup: str, vital: str) -> None:
    assert errors_of(LINE.format(setup=setup, vital=vital)) == ""


def test_logging_that_is_set_up_later_is_left_to_show_it() -> None:
    later = "say(logging.getLogger('checkfreq.manager'), 'before')\nlogging.basicConfig(level=20)"
    said = errors_of(LINE.format(setup=later, vital=VITAL))
    assert said == "checkfreq: before\nINFO:checkfreq.manager:restored step 5\n"
