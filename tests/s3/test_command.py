"""``checkfreq diff`` with a mirror and ``checkfreq doctor`` with an object store: the real command
and a real server, which it finds by the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkfreq.formats import from_torch_save
from checkfreq.mirror.client import RemoteObjects
from checkfreq.store.store import CheckpointStore
from tests.mirror.planting import Planted
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


def save(chk_dir: Path, step: int, *, weight: torch.Tensor) -> None:
    """A checkpoint of a weight, and of a bias that stays as it is."""
    path = chk_dir.with_suffix(".pt")
    torch.save({"model": {"weight": weight, "bias": torch.ones(3)}}, path)
    from_torch_save(path, chk_dir, step=step)


@pytest.fixture
def url(s3: S3Server, tmp_path: Path, prefix: str) -> str:
    """A mirror of step 1, of the directory ``chk`` that went on to step 2."""
    save(tmp_path / "chk", 1, weight=torch.arange(25_000.0))
    store = CheckpointStore(tmp_path / "chk")
    planted = Planted(tmp_path / "planted")
    planted.plant(store, 1, piece_bytes=4000)
    remote = RemoteObjects(s3.mirror(prefix))
    for path in planted.folder.rglob("*"):
        if path.is_file():
            remote.put(str(path.relative_to(planted.folder)), path.read_bytes())
    save(tmp_path / "chk", 2, weight=torch.arange(25_000.0).clamp(max=24_998.0))
    return f"s3://{BUCKET}/{prefix}"


def test_a_directory_is_compared_with_its_mirror(s3: S3Server, url: str, tmp_path: Path) -> None:
    done = checkfreq(s3, "diff", "--json", "chk", url, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["a"] == {"path": str(tmp_path / "chk"), "step": 2}
    assert found["b"] == {"path": url, "step": 1}
    (one,) = found["different_tensors"]
    assert (one["name"], one["num_different"], one["max_abs"]) == ("model.weight", 1, 1.0)
    assert (found["num_tensors"], found["num_equal_tensors"]) == (5, 4)
    done = checkfreq(s3, "diff", "chk", url, "1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1] == f"B  step 1 of {url}"
    assert "equal: " in done.stdout


@ON_BOTH
def test_a_damaged_mirror_is_trouble_and_no_difference(
    s3: S3Server, url: str, tmp_path: Path, prefix: str
) -> None:
    remote = RemoteObjects(s3.mirror(prefix))
    large = [key for key, seen in remote.list("objects/").items() if seen.num_bytes == 4000]
    for key in large:
        remote.put(key, b"\xee" * 4000)
    done = checkfreq(s3, "diff", url, "chk", "1", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected digest" in done.stderr
    remote.delete(large)
    done = checkfreq(s3, "diff", url, "chk", "1", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no such object" in done.stderr


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
