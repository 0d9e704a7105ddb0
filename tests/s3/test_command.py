"""``checkfreq doctor`` with an object store: the real command and a real server, which it finds by
the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkfreq.mirror.client import RemoteObjects
from tests.s3.conftest import ON_BOTH
from tests.s3.server import BUCKET, KEY_ID, SECRET, S3Server

pytestmark = [pytest.mark.s3, pytest.mark.more]

ROOT = Path(__file__).resolve().parents[2]
Done = subprocess.CompletedProcess[str]


def checkfreq(s3: S3Server, *words: object, cwd: Path) -> Done:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **s3.variables()}
    done = subprocess.run(
        [sys.executable, "-m", "checkfreq.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=cwd,
        env=environ,
    )
    assert "Traceback" not in done.stderr
    for told in (done.stdout, done.stderr):
        assert SECRET not in told
    return done


@ON_BOTH
def test_the_doctor_tries_an_object_store_and_leaves_nothing(
    s3: S3Server, tmp_path: Path, prefix: str
) -> None:
    (tmp_path / "chk").mkdir()
    url = f"s3://{BUCKET}/{prefix}"
    words = ("doctor", "chk", "--size", "1MiB", "--mirror", url, "--json", "--page", "doctor.md")
    done = checkfreq(s3, *words, cwd=tmp_path)
    sections = {one["section"]: one["findings"] for one in json.loads(done.stdout)["sections"]}
    found = {one["name"]: one for one in sections["object store"]}
    assert [*found] == ["list", "write", "conditional_write", "upload", "download", "remove"]
    assert {one["status"] for one in found.values()} == {"ok"}, found
    assert found["upload"]["figures"]["bytes_per_s"] > 0
    assert RemoteObjects(s3.mirror(prefix)).list("") == {}
    page = (tmp_path / "doctor.md").read_text()
    for secret in (SECRET, KEY_ID, BUCKET, prefix):
        assert secret not in page


def test_the_doctor_says_what_to_check_where_the_store_does_not_answer(tmp_path: Path) -> None:
    done = checkfreq(S3Server(9), "doctor", f"s3://{BUCKET}/run", "--json", cwd=tmp_path)
    assert done.returncode == 1
    sections = {one["section"]: one["findings"] for one in json.loads(done.stdout)["sections"]}
    problems = [one for one in sections["object store"] if one["status"] == "problem"]
    assert problems
    assert all("AWS_ENDPOINT_URL" in one["mend"] for one in problems)
