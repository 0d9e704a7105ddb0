"""``make compat``: a virtual environment for each pair of Python and torch, and the core in each.

    python -m benchmarks.versions.environments --folder DIR 3.10=2.11.* 3.13=

``3.13=`` is the newest torch that can be installed there. What imports no torch is tested in the
first pair of each Python only. Each environment needs a few gigabytes, since torch from PyPI brings
CUDA. Result lines are appended to benchmarks/results/versions.jsonl.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.lab.results import RESULTS, ROOT

OLDEST = "2.11.*"
PAIRS = tuple(f"{python}={torch}" for python in ("3.10", "3.12", "3.13") for torch in (OLDEST, ""))
#: What the core needs beside checkfreq; not pinned, as nobody's environment is.
_TOOLS = ("hypothesis", "pytest", "pytest-xdist")


def main(argv: Sequence[str] | None = None) -> int:
    """Install and run each pair; returns 1 if one has no result or has failures."""
    args = _arguments(argv)
    firsts = {pair.partition("=")[0]: pair for pair in reversed(args.pairs)}.values()
    failed = [
        pair for pair in args.pairs if not _passes(pair, args.folder, without_torch=pair in firsts)
    ]
    for pair in failed:
        print(f"{pair}: did not pass, see above", file=sys.stderr)
    return int(bool(failed))


def _passes(pair: str, folder: Path, *, without_torch: bool) -> bool:
    version, _, torch = pair.partition("=")
    interpreter = interpreter_of(version)
    if interpreter is None:
        print(f"{pair}: found no Python {version} on PATH or in ~/.pyenv", file=sys.stderr)
        return False
    environment = folder / f"python-{version}-torch-{torch.rstrip('.*') or 'newest'}"
    print(f"{pair}: installing into {environment}", file=sys.stderr)
    python = install(interpreter, environment, f"torch=={torch}" if torch else "torch")
    return python is not None and _measure(python, without_torch=without_torch)


def interpreter_of(version: str) -> Path | None:
    """A Python of this version: ``python3.10`` on PATH, or pyenv's newest."""
    return next((path for path in _candidates(version) if _is(path, version)), None)


def _candidates(version: str) -> Iterator[Path]:
    if (found := shutil.which(f"python{version}")) is not None:
        yield Path(found)
    yield from sorted((Path.home() / ".pyenv/versions").glob(f"{version}*/bin/python3"))[::-1]


def _is(path: Path, version: str) -> bool:
    """Whether it runs: one of pyenv's stand-ins may lead nowhere."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([path, "-c", program], capture_output=True, text=True)
    return done.stdout.strip() == version


def install(interpreter: Path, environment: Path, torch: str) -> Path | None:
    """Make or bring up to date an environment; its Python, or None if pip failed."""
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--upgrade", "--no-input"]
    steps: list[list[str | Path]] = [
        [interpreter, "-m", "venv", environment],
        [*pip, torch, f"{ROOT}[mirror]", *_TOOLS],
    ]
    return python if all(subprocess.run(step).returncode == 0 for step in steps) else None


def _measure(python: Path, *, without_torch: bool) -> bool:
    command = [python, "-m", "benchmarks.versions", *["--without-torch"] * without_torch]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with (RESULTS / "versions.jsonl").open("a") as lines:
        lines.write(done.stdout)
    return done.returncode == 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the environments are")
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="PYTHON=TORCH")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
