"""What a deliberate break is: exact texts, and what replaces them."""

from __future__ import annotations

from dataclasses import dataclass

#: Where most breaks of snapshots are noticed on the fake device.
ON_FAKE = (
    "tests/snapshot/test_device_engine.py",
    "tests/snapshot/test_device_order.py",
    "tests/snapshot/test_device_capture.py",
    "tests/snapshot/test_device_and_host.py",
)


@dataclass(frozen=True, slots=True)
class Break:
    """``edits`` are (text, its replacement) pairs, all in ``file``."""

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    gpu: str | None
    fake: tuple[str, ...] | None = ON_FAKE
    why: str = ""
