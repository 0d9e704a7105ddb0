"""Result lines: one JSON object per line on standard output, with what is needed to repeat it.

A benchmark is run by ``record.run(main, TABLES)``: after its lines, their tables are printed to
standard error.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.results import ROOT
from benchmarks.lab.tables import Line, Table, tables_of
from checkfreq.pacing.environment import UNKNOWN, cpu_model, storage_of

_emitted: list[Line] = []


def emit(
    benchmark: str, *, folder: Path | None = None, packages: Sequence[str] = (), **fields: Any
) -> None:
    """Print one result line to standard output.

    ``folder`` is on the disk that was written to, ``packages`` are the distributions involved.
    """
    line = {"benchmark": benchmark, **fields, **environment(folder, packages)}
    _emitted.append(line)
    print(json.dumps(line), flush=True)


def run(main: Callable[[], object], tables: Mapping[str, Table] | None = None) -> None:
    """Measure, then show the benchmark's own tables of the printed lines."""
    main()
    for table in tables_of(_emitted, tables or {}):
        print(f"\n{table}", file=sys.stderr)


def environment(folder: Path | None = None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Commit, command, machine, versions and storage of this run."""
    storage = {} if folder is None else {"storage": _storage(folder)}
    return {
        "command": shlex.join(["python", "-m", _module_name(), *_without_paths(sys.argv[1:])]),
        "commit": _commit(),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "kernel": platform.release().partition("-")[0],
        },
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **{name: _version(name) for name in packages},
        },
        **storage,
    }


def _without_paths(options: Sequence[str]) -> list[str]:
    """Replace the paths of this machine by ``DIR``: they are of no use to others."""
    return ["DIR" if os.sep in each or each == ".." else each for each in options]


def _storage(folder: Path) -> str:
    """The file system's type, and the name of its device if that is a plain local one."""
    kind, source, *_ = [*storage_of(folder).split(), UNKNOWN, UNKNOWN]
    is_plain = source.startswith("/dev/") and source.count("/") == 2
    return f"{kind} on {Path(source).name}" if is_plain else kind


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of ours / theirs, measured in the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        written = ("benchmarks/results", "README.md", "benchmarks/README.md")
        code = (".", *(f":!{path}" for path in written))
        dirty = "+" if git("status", "--porcelain", "--untracked-files=no", "--", *code) else ""
        return git("rev-parse", "--short", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
