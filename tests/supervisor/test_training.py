"""Real trainings under ``checkfreq run``: the same bits as one that nothing disturbs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.supervisor.supervised import DEADLINE_S, ROOT, RUN


def run(program: str, folder: Path, *words: str, prefix: tuple[str, ...]) -> tuple[int, str]:
    """The exit status of a program, given these words, and what was said."""
    (folder / "train.py").write_text(program)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*prefix, str(folder / "train.py"), *words],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=5 * DEADLINE_S,
    )
    return done.returncode, done.stderr


RANK = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from checkfreq import CFCheckpoint, CFManager, CFMode

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
chk = CFCheckpoint(model=model, optimizer=optimizer)
with CFManager(sys.argv[1], chk, mode=CFMode.MANUAL, chk_freq=2) as cf_manager:
    cf_manager.restore()
    start = cf_manager.global_step
    while cf_manager.global_step < 12 and not cf_manager.should_stop:
        model(torch.ones(2, 4)).sum().backward()
        cf_manager.weight_update()
        cf_manager.step()
        if cf_manager.global_step == 4 and start == 0:
            cf_manager.wait()
            dist.barrier()
            os._exit(9)
        if cf_manager.global_step == 8:
            os.kill(os.getpid(), 15)  # told to stop, as by a scheduler
    stopped = cf_manager.stopped
dist.destroy_process_group()
sys.exit(75 if stopped else 0)
"""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.more
def test_torchrun_is_started_again_until_its_ranks_are_told_to_stop(tmp_path: Path) -> None:
    status, errors = run(RANK, tmp_path, "chk", prefix=(*RUN, "--", sys.executable, *TORCHRUN))
    said = [line for line in errors.splitlines() if line.startswith("checkfreq run: ")]
    assert status == 75, errors
    assert "restart 1 after exit status 1 at step 4: restored step 4" in said[0]
    assert "restored step 4 from memory" in errors
    last = re.fullmatch(r".* stopped: exit status 1 at step (\d+)\. The same command .*", said[-1])
    # Signalled at step 8; the ranks agree on the boundary at which both stop.
    assert last is not None, said
    assert 8 <= int(last[1]) <= 12


KILLED_ONCE_DURABLE = """
import os, signal, sys
import torch
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode

model = torch.nn.Linear(4, 4)
kill = lambda record: record.is_durable and os.kill(os.getpid(), signal.SIGKILL)
with CFManager(
    sys.argv[1], CFCheckpoint(model=model), mode=CFMode.MANUAL, chk_freq=9,
    config=CFConfig(on_stop=kill, keep_in_memory_s=0.0),
) as cf_manager:
    cf_manager.step()
    os.kill(os.getpid(), signal.SIGTERM)
    cf_manager.step()
"""


def test_killed_while_it_closes_after_its_last_checkpoint_a_run_has_stopped(tmp_path: Path) -> None:
    under = (*RUN, "--", sys.executable)
    status, errors = run(KILLED_ONCE_DURABLE, tmp_path, "chk", prefix=under)
    assert status == 75, errors
    assert "checkfreq run: stopped: exit by SIGKILL at step 2" in errors
