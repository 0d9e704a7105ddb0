"""Result lines: one JSON object per line, with what is needed to repeat it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkfreq.surroundings import cpu_model

_ROOT = Path(__file__).resolve().parents[1]


def emit(benchmark: str, **fields: Any) -> None:
    """Print one result line to standard output."""
    print(json.dumps({"benchmark": benchmark, **fields, **surroundings()}), flush=True)


def surroundings() -> dict[str, Any]:
    """Commit, command, machine and versions of this run."""
    return {
        "command": " ".join(["python", "-m", _module_name(), *sys.argv[1:]]),
        "commit": _commit(),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "kernel": platform.release(),
        },
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of ours / theirs, measured in the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        code = (".", ":!benchmarks/results", ":!README.md")  # what a benchmark writes is not code
        dirty = "+" if git("status", "--porcelain", "--untracked-files=no", "--", *code) else ""
        return git("rev-parse", "--short", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
