"""What is on standard error, by how the script set logging up; in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TRAINING = """
import logging, resource, sys
import torch
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode

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
print("a setup for warnings", file=sys.stderr)
logging.basicConfig(level=logging.WARNING, format="%(message)s")
run(mode=CFMode.MANUAL, chk_freq=1).close()
"""


def test_lines_that_matter_are_shown_once_and_a_restore_beside_a_setup_for_warnings(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "chk")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    said, beside = done.stderr.split("a setup for warnings")
    assert said.count("checkfreq: checkpoint of step") == 2  # the first of each run
    assert said.count("checkfreq: restored step") == 1
    assert "checkfreq: checkpoints every" in said
    assert said.count("failed (1 in a row)") == 1
    assert said.count("durable again") == 1
    assert beside.count("checkfreq: ") == beside.count("checkfreq: restored step") == 1


#: Each line of standard input is a way to set logging up, and whether the line is vital: in a fork
#: it is said, and what is on standard error then is one line of the output.
SAYING = """
import json, logging, os, sys, tempfile
from checkfreq.console import say

for line in sys.stdin:
    setup, is_vital = json.loads(line)
    with tempfile.TemporaryFile() as shown:
        pid = os.fork()
        if pid == 0:
            os.dup2(shown.fileno(), 2)
            exec(setup)
            say(logging.getLogger("checkfreq.manager"), "restored step %d", 5, is_vital=is_vital)
            if sys.stderr is not None:
                sys.stderr.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        shown.seek(0)
        print(json.dumps(shown.read().decode()), flush=True)
"""
SAID = "checkfreq: restored step 5\n"
#: What is shown of a line, and of a vital one, after each way to set logging up.
SETUPS = {
    "nothing": ("", SAID, SAID),
    "a level that lets it through": (
        "logging.getLogger('checkfreq').setLevel(logging.INFO)",
        SAID,
        SAID,
    ),
    "a root level that lets it through": (
        "logging.getLogger().setLevel(logging.DEBUG)",
        SAID,
        SAID,
    ),
    "basicConfig at its default level": ("logging.basicConfig()", "", SAID),
    "a level of the root": ("logging.getLogger().setLevel(logging.ERROR)", "", SAID),
    "a handler elsewhere": (
        "logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))",
        "",
        SAID,
    ),
    "logging.disable": ("logging.disable(logging.INFO)", "", ""),
    "a level of ours": ("logging.getLogger('checkfreq').setLevel(logging.WARNING)", "", ""),
    "a null handler": ("logging.getLogger('checkfreq').addHandler(logging.NullHandler())", "", ""),
    "no last resort": ("logging.lastResort = None", "", ""),
    "no standard error": ("sys.stderr = None", "", ""),
    "a handler of the script": (
        "logging.basicConfig(level=20)",
        *(["INFO:checkfreq.manager:restored step 5\n"] * 2),
    ),
    "one that comes later": (
        "say(logging.getLogger('checkfreq.manager'), 'before')\nlogging.basicConfig(level=20)",
        *(["checkfreq: before\nINFO:checkfreq.manager:restored step 5\n"] * 2),
    ),
}


def test_a_line_is_printed_where_nobody_would_show_it_but_for_whom_it_was_set_up() -> None:
    wanted = [
        json.dumps([setup, vital]) for setup, *_ in SETUPS.values() for vital in (False, True)
    ]
    done = subprocess.run(
        [sys.executable, "-c", SAYING],
        input="\n".join(wanted),
        capture_output=True,
        text=True,
        check=True,
        timeout=300.0,
    )
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    for (name, (_, *expected)), *found in zip(SETUPS.items(), shown[::2], shown[1::2], strict=True):
        assert found == expected, name
