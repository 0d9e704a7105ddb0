"""A run that is told to stop ends durably, and goes on to the same bits."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from tests.acceptance.processes import run_to_end, verify_all
from tests.acceptance.programs import Run, Training
from tests.patience import slowness

pytestmark = pytest.mark.crash

LIMIT_S = 120.0
TOKEN = "PUT /latest/api/token"
NOTICE = "GET /latest/meta-data/spot/instance-action"


@pytest.fixture
def cloud() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a metadata service, and its answers."""
    answers: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = answers.get(f"{self.command} {self.path}")
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or "")))
            self.end_headers()
            self.wfile.write((body or "").encode())

        do_GET = do_PUT = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", answers
        server.shutdown()


def train_until_stopped(
    chk_dir: Path, config: CFConfig, *, told_at: int = 0, iteration_s: float = 0.0
) -> int:
    """The step at which the run stops; SIGTERM comes after ``told_at`` steps, if that is given."""
    training, limit_s = Training(), time.monotonic() + LIMIT_S
    chk = CFCheckpoint(**training.tracked())
    with CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0, config=config) as manager:
        assert not manager.restore()
        while not manager.stopped:
            assert time.monotonic() < limit_s
            training.update(manager)
            time.sleep(iteration_s)
            manager.step()
            if manager.global_step == told_at:
                os.kill(os.getpid(), signal.SIGTERM)
    return manager.global_step


def goes_on_to_the_same_bits(chk_dir: Path, step: int) -> bool:
    last = step + 3
    after = run_to_end(Run(str(chk_dir), last))
    whole = run_to_end(Run(str(chk_dir.with_name("whole")), last, checkpoints=False))
    assert after.restored == (step, whole.boundaries[step])
    return after.boundaries.items() <= whole.boundaries.items()


def test_sigterm_makes_the_next_boundary_the_last_and_durable(tmp_path: Path) -> None:
    step = train_until_stopped(tmp_path / "chk", CFConfig(nice=0), told_at=7)
    assert step in (7, 8)
    assert verify_all(tmp_path / "chk") == [step]
    assert goes_on_to_the_same_bits(tmp_path / "chk", step)


def test_a_spot_notice_ends_the_run_before_the_machine_goes(
    cloud: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    url, answers = cloud
    ends = datetime.now(timezone.utc) + timedelta(seconds=9.0 * slowness())
    answers[TOKEN] = "t0ken"
    answers[NOTICE] = json.dumps(
        {"action": "terminate", "time": ends.strftime("%Y-%m-%dT%H:%M:%SZ")}
    )
    config = CFConfig(nice=0, notices=("aws",), metadata_url=url)
    step = train_until_stopped(tmp_path / "chk", config, iteration_s=0.05)
    assert datetime.now(timezone.utc) < ends
    assert verify_all(tmp_path / "chk") == [step]
    assert goes_on_to_the_same_bits(tmp_path / "chk", step)
