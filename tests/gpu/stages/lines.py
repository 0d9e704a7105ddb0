"""What the stages of the GPU proof share: their lines, and whether this is a dry run."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch

from tests.gpu.runner import ROOT


def say(what: str, **fields: Any) -> None:
    """Print a line at once; with ``ok`` it is a claim."""
    print(json.dumps({"what": what, **fields}), flush=True)


def is_dry() -> bool:
    """Whether to run on the CPU, with sizes that take seconds."""
    return "--dry" in sys.argv or not torch.cuda.is_available()


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk of the checkout, in one that git ignores."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir=build, prefix="gpu-proof-")


def synchronize(device: torch.device) -> None:
    """Wait for what is queued on the device, if it has a queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
