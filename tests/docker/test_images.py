"""The CPU image is built and run by an engine of our own: not root, nothing writable, stopped.

Without an engine these skip, and CHECKFREQ_REQUIRE=docker has them fail. The base image is made
of this machine's files, and the packages come from where this environment's pip finds them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest

import checkfreq
from tests.docker import base, engine, index
from tests.required import require

pytestmark = [pytest.mark.more, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train.py")
USER = 10001
GRACE_S = 60
DEADLINE_S = 200.0
#: As a careful cluster runs a container.
CONFINED = (
    *("--read-only", "--tmpfs", "/tmp:size=64m", "--shm-size", "256m", "--network", "none"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.Engine]:
    """An engine with the image ``checkfreq:cpu``."""
    if (why := base.why_not()) is not None:
        require("docker", why)
    folder = tmp_path_factory.mktemp("image")
    try:
        with engine.started() as docker:
            build(docker, folder)
            yield docker
    except engine.NoEngineError as error:
        require("docker", str(error))


def build(docker: engine.Engine, folder: Path) -> None:
    """Build the image from docker/Dockerfile.cpu as it is."""
    packages = folder / "index"
    packages.mkdir()
    needed = [name for name in requires("checkfreq") or () if "extra ==" not in name]
    index.fill(packages, *needed, "pillow", "tqdm", "setuptools")
    index.fill(packages, "torchvision", dependencies=False)
    with index.served(packages) as address:
        base.write(folder / "base.tar", index=address)
        docker.run("import", folder / "base.tar", "base:1")
        arguments = ("BASE=base:1", f"TORCH_INDEX={address}")
        docker.run(
            *("build", "--network", "host", "--file", ROOT / "docker" / "Dockerfile.cpu"),
            *(part for argument in arguments for part in ("--build-arg", argument)),
            *("--tag", "checkfreq:cpu", ROOT),
        )


@pytest.fixture
def chk_dir(tmp_path: Path) -> Path:
    """A directory of the image's user."""
    folder = tmp_path / "chk"
    folder.mkdir()
    os.chown(folder, USER, USER)
    return folder


@pytest.fixture
def training(docker: engine.Engine, chk_dir: Path) -> Iterator[Callable[..., str]]:
    """Start a container that trains with a command; it trains when its name is returned."""

    def start(*command: str) -> str:
        mounts = ("--volume", f"{chk_dir}:/chk", "--volume", f"{TRAIN}:/train.py:ro")
        started = docker.run("run", "--detach", *CONFINED, *mounts, "checkfreq:cpu", *command)
        name = started.stdout.split()[-1]
        end_s = time.monotonic() + DEADLINE_S
        while "training" not in (said := docker.run("logs", name).stdout):
            assert docker.inspect(name, ".State.Running") == "true", said
            assert time.monotonic() < end_s, said
            time.sleep(0.1)
        return name

    yield start
    docker.remove_containers()


@pytest.mark.parametrize(
    "command",
    [("python",), ("checkfreq", "run", "--", "python")],
    ids=["python is the first process", "checkfreq run is"],
)
def test_docker_stop_ends_a_confined_training_with_a_checkpoint_and_status_75(
    docker: engine.Engine, training: Callable[..., str], chk_dir: Path, command: tuple[str, ...]
) -> None:
    for is_restored in (False, True):
        before = steps(chk_dir)
        name = training(*command, "/train.py", "/chk")
        docker.run("stop", "--time", str(GRACE_S), name)
        said = docker.run("logs", name).stdout
        assert docker.inspect(name, ".State.ExitCode") == "75", said
        assert f"restored {is_restored}" in said
        assert max(steps(chk_dir)) > max(before, default=0)
    last = max(steps(chk_dir))
    assert set(checkfreq.load(chk_dir, step=last)) >= {"model", "optimizer"}
    assert {path.stat().st_uid for path in chk_dir.rglob("*")} == {USER}


def steps(chk_dir: Path) -> set[int]:
    """The steps of all checkpoints."""
    return {int(path.name.removeprefix("step-")) for path in chk_dir.glob("step-*")}


def test_the_default_command_is_the_demo_and_every_claim_of_it_holds(
    docker: engine.Engine,
) -> None:
    command = docker.inspect("checkfreq:cpu", "json .Config.Cmd")
    assert command == '["python","-m","benchmarks.demo","--out","/tmp/demo-out"]'
    room = ("--tmpfs", "/tmp/demo-out:mode=1777,size=2g")
    said = docker.run("run", "--rm", *CONFINED, *room, "checkfreq:cpu").stdout
    assert re.findall(r"^ *[0-9.]+ s  (yes|NO) ", said, re.M) == ["yes"] * 6, said


def test_the_image_is_not_roots_and_holds_no_caches_nor_sources(docker: engine.Engine) -> None:
    look = r"id -u; find / -xdev \( -path '*/.cache/*' -o -path '*/source' \) 2>&1; ls /checkfreq"
    said = docker.run("run", "--rm", *CONFINED, "checkfreq:cpu", "sh", "-c", look)
    assert said.stdout.split() == [str(USER), "benchmarks", "constraints.txt"]
