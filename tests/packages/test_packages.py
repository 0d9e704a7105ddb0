"""A wheel and an sdist are built, pass their checks, and work where only they are installed."""

from __future__ import annotations

import os
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.docs.page import snippets_of
from tests.packages.recipe import python_requires
from tests.packages.wheels import ROOT, TOOLS, Packages, build, installed, run

pytestmark = pytest.mark.more

SAVED = """
import torch
import checkfreq
chk = checkfreq.CFCheckpoint(model=torch.nn.Linear(4, 4))
with checkfreq.CFManager("chk", chk, mode=checkfreq.CFMode.MANUAL, chk_freq=0) as manager:
    manager.step()
    manager.save(wait=True)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return build(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def beside_torch(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the wheel and what this one has."""
    return installed(packages, tmp_path_factory.mktemp("environments") / "full")


@pytest.fixture(scope="module")
def metadata(packages: Packages) -> Message:
    with zipfile.ZipFile(packages.wheel) as wheel:
        (name,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
        return Parser().parsestr(wheel.read(name).decode())


def test_nothing_but_the_two_packages_is_at_the_top_of_the_wheel(packages: Packages) -> None:
    with zipfile.ZipFile(packages.wheel) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"checkfreq", "iterators"}
    data = {"checkfreq/py.typed", "iterators/py.typed", "checkfreq/simulation/rank_costs.jsonl"}
    assert data <= set(names)
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("checkfreq", "iterators")
        for path in (ROOT / package).rglob("*.py")
    }
    assert sources == {name for name in names if name.endswith(".py")}


def test_the_sdist_has_what_the_wheel_is_built_from(packages: Packages) -> None:
    with tarfile.open(packages.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    needed = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "checkfreq/py.typed"}
    assert needed <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_twine_finds_nothing(packages: Packages, tmp_path: Path) -> None:
    command = [TOOLS, "-m", "twine", "check", "--strict", packages.wheel, packages.sdist]
    assert run(command, cwd=tmp_path).stdout.count("PASSED") == 2


def test_no_version_of_python_or_torch_is_kept_out_by_an_upper_bound(metadata: Message) -> None:
    assert metadata["Requires-Python"] == python_requires() == ">=3.10"
    required = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert "torch>=2.11" in required
    assert not [one for one in required if "<" in one or "==" in one]


def test_the_example_of_the_readme_runs_from_the_wheel(beside_torch: Path, tmp_path: Path) -> None:
    snippets = list(snippets_of((ROOT / "README.md").read_text()))
    assert [one.language for one in snippets] == ["python", "python"]
    where = "import checkfreq, iterators\nprint(checkfreq.__file__, iterators.__file__)\n"
    (tmp_path / "train.py").write_text("\n".join([*(one.code for one in snippets), where]))
    environment = beside_torch.parent
    said = run([beside_torch / "python", "train.py"], cwd=tmp_path).stdout
    assert said.split()[-2:] == [
        str(next(environment.glob(f"lib/*/site-packages/{name}/__init__.py")))
        for name in ("checkfreq", "iterators")
    ]
    verified = run([beside_torch / "checkfreq", "verify", "chk"], cwd=tmp_path).stdout
    assert ": ok, " in verified


@pytest.mark.parametrize("page", ["slurm.md", "spot.md"])
def test_the_job_files_of_a_page_are_copied_from_the_wheel(
    page: str, beside_torch: Path, tmp_path: Path
) -> None:
    copy, *_ = snippets_of((ROOT / "docs" / page).read_text())
    path = f"{beside_torch}:{os.environ['PATH']}"
    run(["bash", "-c", copy.code.removeprefix("$ ")], cwd=tmp_path, PATH=path)
    assert {path.name for path in (tmp_path / "jobs").iterdir()} == {
        path.name for path in (ROOT / "checkfreq/examples/jobs").iterdir()
    }
    assert os.access(tmp_path / "jobs/chain.sh", os.X_OK)


def test_commands_that_look_need_the_wheel_click_and_xxhash_alone(
    packages: Packages, beside_torch: Path, tmp_path: Path
) -> None:
    run([beside_torch / "python", "-c", SAVED], cwd=tmp_path)
    small = installed(packages, tmp_path / "small", beside=["click", "xxhash"])
    assert run([small / "checkfreq", "--version"], cwd=tmp_path).stdout.startswith("checkfreq ")
    for command in (["ls", "chk"], ["show", "--tensors", "chk"], ["verify", "chk"]):
        assert run([small / "checkfreq", *command], cwd=tmp_path).stdout
    run([small / "checkfreq", "run", "--", "true"], cwd=tmp_path)


def test_what_is_missing_beside_the_wheel_is_said(packages: Packages, tmp_path: Path) -> None:
    for missing, beside in (("click", []), ("xxhash", ["click"])):
        bare = installed(packages, tmp_path / missing, beside=beside)
        for command in (["ls", "chk"], ["run", "--", "true"]):
            ended = run([bare / "checkfreq", *command], cwd=tmp_path, check=False)
            assert ended.returncode == 2
            (line,) = ended.stdout.splitlines()
            assert line.startswith(f"checkfreq: expected the package {missing} beside checkfreq")
            assert line.endswith(f"-m pip install {missing}")


def test_mypy_strict_passes_on_a_script_against_the_wheel(
    beside_torch: Path, tmp_path: Path
) -> None:
    mypy = [beside_torch / "python", "-m", "mypy", "--strict", "--no-error-summary"]
    script = tmp_path / "user.py"
    script.write_text((ROOT / "tests/packages/user.py").read_text())
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from checkfreq import CFConfig\n\nCFConfig(num_slots='many')\n")
    cache = f"--cache-dir={tmp_path / 'cache'}"
    ended = run([*mypy, cache, script.name, wrong.name], cwd=tmp_path, check=False)
    (line,) = ended.stdout.splitlines()
    assert line.startswith("wrong.py:3: error: Argument")
