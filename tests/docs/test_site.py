"""The documentation site builds without a warning, and has every public name."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from checkfreq.examples.imagenet.models import import_torchvision

ROOT = Path(__file__).resolve().parents[2]
#: Modules whose public names have a place on the API pages.
MODULES = (
    "checkfreq",
    "checkfreq.formats",
    "checkfreq.helpers",
    "checkfreq.integrations.dcp",
    "checkfreq.integrations.lightning",
    "checkfreq.simulation",
    "checkfreq.testing",
    "iterators",
    "iterators.dali",
    "iterators.testing",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as ``make docs`` builds it."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-qEW", "--keep-going", "-b", "html"]
    ran = subprocess.run(
        [*command, str(ROOT / "docs"), str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout
    return out


@pytest.mark.more
def test_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "index.html").exists()


@pytest.mark.more
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_place_on_the_api_pages(module: str, site: Path) -> None:
    page = (site / "api" / f"{module}.html").read_text()
    import_torchvision()  # Lightning imports it, and its operators may be missing
    public = import_module(module).__all__
    assert [name for name in public if f'id="{module}.{name}"' not in page] == []
