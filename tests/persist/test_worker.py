"""The real worker process, driven through its client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from checkfreq.config import CFConfig
from checkfreq.persist import protocol as p
from checkfreq.persist.client import WorkerClient
from checkfreq.persist.outlived import OUTLIVED
from checkfreq.store.marks import StepMark
from checkfreq.store.store import CheckpointStore
from tests.persist.conftest import HandMadeSlot, next_reply, request


def test_a_snapshot_becomes_a_checkpoint_that_verifies(
    client: WorkerClient, slot: HandMadeSlot, tmp_path: Path
) -> None:
    before_s = time.perf_counter()
    client.submit(request(7, keep=True, metrics={"accuracy": 0.5}))

    reply = next_reply(client)

    assert isinstance(reply, p.Committed)
    begun_s = reply.ended_s - reply.persist_s  # on the trainer's clock
    assert before_s < begun_s < begun_s + reply.write_s < reply.ended_s < time.perf_counter()
    assert reply.num_bytes == sum(file.num_bytes for file in slot.files)
    store = CheckpointStore(tmp_path / "chk")
    assert store.verify(7).objects == {"scheduler": {"last_epoch": 7}}
    assert store.marks()[7] == StepMark(True, {"accuracy": 0.5})
    for file in slot.files:
        written = (store.path(7) / file.name).read_bytes()
        assert written == slot.memory[file.slot_offset : file.slot_offset + file.num_bytes]


def test_maintenance_asked_of_a_dead_worker_is_asked_of_its_replacement(
    client: WorkerClient, tmp_path: Path
) -> None:
    client.submit(request(3))
    assert isinstance(next_reply(client), p.Committed)
    assert client._process is not None
    os.kill(client._process.pid, signal.SIGKILL)
    client._process.wait(120.0)
    client.ask(p.AddMark(3, keep=True, metrics={}))

    client.replace()

    assert isinstance(next_reply(client), p.Opened)
    assert next_reply(client) == p.Done("AddMark", (3,))
    assert CheckpointStore(tmp_path / "chk").marks()[3].keep
    client.replace()
    assert isinstance(next_reply(client), p.Opened)
    assert client.poll(timeout_s=0.2) is None, "it was asked again"


def test_a_replacement_is_not_told_of_slots_that_were_freed(
    client: WorkerClient, slot: HandMadeSlot, tmp_path: Path
) -> None:
    gone = os.memfd_create("gone")
    os.ftruncate(gone, 4096)
    client.share_slot(1, fd=gone, num_bytes=4096)
    client.forget_slots()
    os.close(gone)
    slot.share(client)

    client.replace()
    client.submit(request(5))

    assert isinstance(next_reply(client), p.Opened)
    assert isinstance(next_reply(client), p.Committed)


def test_the_worker_outlives_signals_to_every_process_of_a_job(client: WorkerClient) -> None:
    assert client._process is not None
    for step, number in enumerate(OUTLIVED, 1):
        os.kill(client._process.pid, number)
        client.submit(request(step))
        assert isinstance(next_reply(client), p.Committed), number.name


def test_the_worker_outlives_signals_that_come_before_it_is_up(tmp_path: Path) -> None:
    client = WorkerClient(tmp_path / "chk", config=CFConfig(takeover_s=120.0))
    client.start()
    try:
        started = client._process
        assert started is not None
        for number in OUTLIVED:
            os.kill(started.pid, number)
        client.wait_opened()
        assert client._process is started
        assert started.is_alive()
    finally:
        client.kill()


def test_the_worker_imports_only_what_every_worker_needs() -> None:
    # The last three are a third of its start: imported once there is a mirror, or somebody to ask
    # for the end. Python 3.10's own platform imports subprocess.
    packages = {"torch", "numpy", "checkfreq.mirror", "checkfreq.notices", "subprocess"}
    code = (
        "import sys, platform; before = set(sys.modules); import checkfreq.persist.worker; "
        f"print({packages} & (set(sys.modules) - before))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
