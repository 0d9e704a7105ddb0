"""The claims of the stages that kill a training can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.gpu.runner import ROOT


@pytest.mark.more
@pytest.mark.slow
def test_state_that_is_not_what_was_saved_fails_the_claims() -> None:
    command = [sys.executable, "-m", "tests.gpu.stages.graphs", "--dry", "--spoil"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    claims = {line["what"]: line["ok"] for line in lines if "ok" in line}
    wrong = {what for what, is_ok in claims.items() if not is_ok}
    assert wrong == {"model", "optimizer", "losses", "checkpoints"}
    assert claims.keys() - wrong == {"generators", "restarts", "warnings"}
