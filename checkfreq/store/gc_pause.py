"""Keeping Python's garbage collector from running while very many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection meanwhile.

    Two objects are made per tensor in a capture, and one more for its copy, enough to set off
    full collections: to capture 10,000 tensors in a process with a large heap took 270 ms
    instead of 30. A commit record parses in a half to an eighth of the time (2026-11).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
