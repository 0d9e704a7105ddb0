"""What the tests of the supervisor share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_signals_ignored() -> Iterator[None]:
    """A shell has what it runs in the background ignore these two, and children inherit that."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGQUIT)}
    ignored = {one for one, handler in before.items() if handler is signal.SIG_IGN}
    for one in ignored:
        signal.signal(one, signal.SIG_DFL)
    yield
    for one in ignored:
        signal.signal(one, signal.SIG_IGN)
