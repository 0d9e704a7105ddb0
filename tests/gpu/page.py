"""The page that a run of the GPU tests ends with: what was run where, and what came out.

Pure, but for ``about_this_machine``. It names no host, user or path.
"""

from __future__ import annotations

import platform
import resource
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from checkfreq.pacing.environment import cpu_model
from checkfreq.snapshot.memory import available_host_bytes
from checkfreq.snapshot.pin_failures import Machine

ROOT = Path(__file__).resolve().parents[2]
NO_DEVICE = "no CUDA device"
_GIB = 2**30
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A command that was run: why it has no good end, if so, and the JSON lines that it gave."""

    name: str
    problem: str = ""
    seconds: float = 0.0
    lines: Sequence[Line] = ()
    last_output: Sequence[str] = ()


@dataclass(slots=True)
class Results:
    """Tests by how they ended; one that never ended was running when the process died."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Results:
        """Of the lines of the plugin in outcomes.py."""
        tests, running = cls(), dict[str, None]()
        for line in lines:
            name, outcome = line["test"], line["outcome"]
            if outcome == "started":
                running[name] = None
                continue
            running.pop(name, None)
            if outcome == "passed":
                tests.passed.append(name)
            else:
                getattr(tests, outcome)[name] = line["why"]
        tests.failed |= dict.fromkeys(running, "it did not end")
        return tests


def is_good(tests: Results, steps: Sequence[Step], *, device: bool) -> bool:
    """Whether everything was run and passed."""
    return device and bool(tests.passed) and not tests.failed and not any(s.problem for s in steps)


def page(about: Mapping[str, str], tests: Results, steps: Sequence[Step]) -> str:
    """The whole page."""
    device = about["device"] != NO_DEVICE
    verdict = "PASSED" if is_good(tests, steps, device=device) else "FAILED"
    if not device:
        verdict = f"NOT TESTED: {NO_DEVICE}"
    parts = [
        f"checkfreq on a GPU: {verdict}",
        "\n".join(f"{name:<12}{value}" for name, value in about.items()),
        _of_tests(tests),
        *(_of_step(step) for step in steps),
        _figures([line for step in steps for line in step.lines]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_tests(tests: Results) -> str:
    counts = f"{len(tests.passed)} passed, {len(tests.failed)} failed, {len(tests.skipped)} skipped"
    failed = [f"  failed   {name}\n           {why}" for name, why in tests.failed.items()]
    reasons = Counter(tests.skipped.values())
    skipped = [f"  skipped  {count}: {why}" for why, count in reasons.items()]
    return "\n".join([f"tests: {counts}", *failed, *skipped])


def _of_step(step: Step) -> str:
    if not step.problem:
        return f"{step.name}: ended well after {step.seconds:.0f} s"
    output = [f"  | {line}" for line in step.last_output]
    return "\n".join([f"{step.name}: {step.problem}", *output])


def _figures(lines: Sequence[Line]) -> str:
    """Stall, overlap, pinning and exactness, and how ours compares."""
    found = ((_SHOWN.get((str(line.get("benchmark")), _kind(line))), line) for line in lines)
    return "\n".join(show(line) for show, line in found if show is not None)


def _kind(line: Line) -> str:
    return "target" if "target" in line else str(line.get("what", ""))


def _snapshots(line: Line) -> str:
    return (
        f"snapshots of {line['gib']:g} GiB to the {line['place']}: "
        f"stall {line['stall_ms']:g} ms, overlap {100 * line['overlap']:.1f} % "
        f"of a copy of {line['copy_s']:g} s (waited {line['waited_ms']:g} ms), "
        f"slots ready after {line['slots_s']:g} s, "
        f"exact: {line['exact']} of {line['saves']} checkpoints bit for bit"
    )


def _pinning(line: Line) -> str:
    return f"pinning {line['gib']:g} GiB: {line['pin_s']:g} s, unpinning {line['unpin_s']:g} s"


def _target(line: Line) -> str:
    met = {True: "met", False: "missed", None: "undecided"}[line["met"]]
    return (
        f"{line['target']}, against {line['among']} ({line['best']}): {line['ratio']:g} "
        f"(target {line['allowed']:g}: {met})"
    )


_SHOWN: dict[tuple[str, str], Callable[[Line], str]] = {
    ("device", "snapshots"): _snapshots,
    ("device", "pinning"): _pinning,
    ("compare", "target"): _target,
}


def about_this_machine() -> dict[str, str]:
    """Versions, device, driver, kernel, limits."""
    host_bytes, machine = available_host_bytes(), Machine.here()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "commit": _commit(),
        "checkfreq": metadata_version("checkfreq"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": _cuda(),
        "device": _device(),
        "driver": machine.driver or "unknown",
        "kernel": machine.kernel,
        "cpu": f"{cpu_model()}, {torch.get_num_threads()} threads",
        "memory": "unknown" if host_bytes is None else f"{host_bytes / _GIB:.0f} GiB available",
        "ulimit -l": "unlimited" if locked == resource.RLIM_INFINITY else f"{locked // 1024} KiB",
    }


def metadata_version(package: str) -> str:
    """Its version; "in place" if it was not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "in place"


def _cuda() -> str:
    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip else torch.version.cuda or "none: PyTorch was built without it"


def _device() -> str:
    if not torch.cuda.is_available():
        return NO_DEVICE
    one = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {one.name}, {one.total_memory / _GIB:.0f} GiB"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
