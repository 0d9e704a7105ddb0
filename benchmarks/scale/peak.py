"""The peak of this process's resident memory since an instant, as counted by the kernel.

The count can be off by a few hundred KiB. Where the kernel's peak cannot be reset (some sandboxes),
the largest value seen at a `sample` counts.
"""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_THE_PEAK = "5"


class Peak:
    """Anonymous, shared and file pages together, in bytes."""

    def __init__(self, *, clear: Path = _CLEAR) -> None:
        self._is_exact = _forget(clear)
        self._before = self._most = _resident("VmRSS")

    def sample(self) -> None:
        """Sample now."""
        self._most = max(self._most, _resident("VmHWM" if self._is_exact else "VmRSS"))

    def growth(self) -> int:
        """The peak since this was created, minus the value at that time."""
        self.sample()
        return self._most - self._before


def _forget(clear: Path) -> bool:
    try:
        clear.write_text(_FORGET_THE_PEAK)
    except OSError:
        return False
    return True


def _resident(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{_STATUS} has no {name}")
