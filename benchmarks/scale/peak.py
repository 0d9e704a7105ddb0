"""The most memory that this process had resident since an instant, by the kernel's own count.

The count is off by a few hundred KiB at times. Where the kernel's mark cannot be set back (some
sandboxes), what was seen at each `note` counts.
"""

from __future__ import annotations

from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_FORGET_THE_PEAK = "5"


class Peak:
    """Of anonymous, shared and file pages together, in bytes."""

    def __init__(self, *, clear: Path = _CLEAR) -> None:
        self._is_exact = _forget(clear)
        self._before = self._most = _resident("VmRSS")

    def note(self) -> None:
        """Look now."""
        self._most = max(self._most, _resident("VmHWM" if self._is_exact else "VmRSS"))

    def growth(self) -> int:
        """The most since this was made, less what there was then."""
        self.note()
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
