"""What is not used is not imported: each integration brings its framework, and only it does."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

FRAMEWORKS = ("accelerate", "lightning", "obstore", "pytorch_lightning", "safetensors")
FRAMEWORKS += ("torchao", "transformers")


def imported(statement: str) -> set[str]:
    """The modules that ``python -X importtime`` reports for the statement."""
    command = [sys.executable, "-W", "ignore", "-X", "importtime", "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return {*re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE)}


@pytest.mark.parametrize("module", ["checkfreq.manager", "checkfreq.formats", "iterators.torch"])
def test_no_framework_is_imported_that_was_not_asked_for(module: str) -> None:
    found = imported(f"import {module}")
    assert module in found
    assert not found & {*FRAMEWORKS}


@pytest.mark.more
@pytest.mark.parametrize("integration", ["accelerate", "lightning", "transformers"])
def test_an_integration_imports_its_own_framework(integration: str) -> None:
    vision = "from tests.integrations.vision import import_torchvision; import_torchvision(); "
    found = imported(f"{vision}import checkfreq.integrations.{integration}")
    assert integration in found
    ours = {name.split(".")[2] for name in found if name.startswith("checkfreq.integrations.")}
    needed = {"accelerate"} if integration == "transformers" else set()  # Trainer stands on it
    assert ours == {integration, *needed}
