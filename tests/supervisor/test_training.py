"""Real trainings under ``checkfreq run``: the same bits as one that nothing disturbs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkfreq.persist.handover import release_all
from checkfreq.store.store import CheckpointStore
from tests.supervisor.supervised import AS_PID_1, DEADLINE_S, ROOT, RUN, can_be_pid_1

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from checkfreq import CFCheckpoint, CFManager, CFMode
from iterators import CFIterator
from iterators.testing import digest

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
with (folder / "runs").open("a") as runs:
    print(" ".join(sys.argv[1:]), file=runs)
num_runs = len((folder / "runs").read_text().splitlines())
torch.manual_seed(0)
inputs = torch.randn(400, 8)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
chk = CFCheckpoint(model=model, optimizer=optimizer)
with CFManager(folder / "chk", chk, mode=CFMode.MANUAL, chk_freq=3) as cf_manager:
    loader = CFIterator(DataLoader(data, batch_size=8, shuffle=True), cf_manager=cf_manager)
    cf_manager.restore()
    start = cf_manager.global_step
    for epoch in loader.epochs(4):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            cf_manager.weight_update()
            optimizer.zero_grad()
            if num_runs <= kills and cf_manager.global_step == start + 13:
                cf_manager.wait()  # a checkpoint of this run is durable
            if num_runs <= kills and cf_manager.global_step == start + 16:
                os.kill(os.getpid(), signal.SIGKILL)
bits = digest([model.state_dict(), optimizer.state_dict()])
(folder / "result").write_text(json.dumps({"bits": bits, "step": cf_manager.global_step}))
"""


def script(folder: Path) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def train(folder: Path, *, kills: int, prefix: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """The result of a training, and what the supervisor said."""
    folder.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script(folder)), str(folder), str(kills)]
    done = subprocess.run(
        [*prefix, *command], env=environ, capture_output=True, text=True, timeout=5 * DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("checkfreq run: ")]
    return json.loads((folder / "result").read_text()), lines


@pytest.mark.parametrize(
    ("kills", "options"),
    [(1, ()), *(pytest.param(10, given, marks=pytest.mark.more) for given in ((), ("--standby",)))],
)
def test_killed_over_and_over_it_ends_with_the_same_bits(
    tmp_path: Path, kills: int, options: tuple[str, ...]
) -> None:
    whole, _ = train(tmp_path / "whole", kills=0, prefix=())
    found, said = train(tmp_path / "killed", kills=kills, prefix=(*RUN, *options, "--"))
    assert found == whole
    restarts = [line for line in said if "restart " in line]
    assert len(restarts) == kills
    for number, line in enumerate(restarts, 1):
        assert re.search(
            rf"restart {number} after exit by SIGKILL at step \d+: restored step \d+, "
            r"(\d+ steps? lost \(\d+\.\d s of training\)|nothing lost), \d+\.\d s down",
            line,
        ), line
    assert said[-1] == "checkfreq run: finished: exit status 0 at step 200"


RANK = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from checkfreq import CFCheckpoint, CFManager, CFMode

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
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


@pytest.mark.more
def test_torchrun_is_started_again_until_its_ranks_are_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*RUN, "--", *torchrun, str(tmp_path / "rank.py"), str(tmp_path / "chk")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=5 * DEADLINE_S,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("checkfreq run: ")]
    assert done.returncode == 75, done.stderr
    assert "restart 1 after exit status 1 at step 4: restored step " in said[0]
    last = re.fullmatch(
        r"checkfreq run: stopped: exit status 1 at step (\d+)\. The same command goes on .*",
        said[-1],
    )
    # Signalled at step 8; the ranks agree on the boundary at which both stop.
    assert last is not None, said
    assert 8 <= int(last[1]) <= 12


KILLED_WHILE_IT_SAVES = """
import os, signal, sys, time
from pathlib import Path
import torch
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
chk = CFCheckpoint(model=model, optimizer=optimizer)
config = CFConfig(keep_in_memory_s=3600.0)
cf_manager = CFManager(sys.argv[1], chk, mode=CFMode.MANUAL, chk_freq=1, config=config)
model(torch.ones(2, 4)).sum().backward()
cf_manager.weight_update()
cf_manager.step()
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.more
@pytest.mark.parametrize("as_pid_1", [False, True])
def test_the_worker_of_a_killed_training_finishes_before_the_supervisor_ends(
    tmp_path: Path, as_pid_1: bool
) -> None:
    if as_pid_1 and not can_be_pid_1():
        pytest.skip("namespaces of processes cannot be made here")
    (tmp_path / "train.py").write_text(KILLED_WHILE_IT_SAVES)
    gate = tmp_path / "gate"
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CHECKFREQ_FAULT": f"commit.rename:pause-{gate}",
    }
    train = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "chk"), f"{gate}.reached"]
    with subprocess.Popen(
        [*(AS_PID_1 if as_pid_1 else ()), *RUN, "--max-restarts=0", "--", *train],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if line.startswith("checkfreq run: "))
        assert "waiting for what is still being written" in said
        assert CheckpointStore(tmp_path / "chk").steps() == []
        gate.touch()
        assert process.wait(DEADLINE_S) == 137
    assert CheckpointStore(tmp_path / "chk").steps() == [1]
    release_all(tmp_path / "chk")  # a worker that is not in the namespace keeps its memory
