"""Gates that are opened once an update waits for the copy that they hold back."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def opened_while_waited_for(open_gate: Callable[[], object]) -> Iterator[None]:
    """Open the gate only once checkfreq has the calling thread wait for an event.

    Opened any earlier, the copy may be done before the update asks for it: then nothing waits.
    """
    caller, is_over = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            if waits_for_an_event(caller):
                open_gate()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def waits_for_an_event(thread: int) -> bool:
    """Whether code of checkfreq has called ``threading.Event.wait`` in this thread, and waits."""
    return any(
        frame.f_code is threading.Event.wait.__code__
        and frame.f_back is not None
        and frame.f_back.f_globals["__name__"].startswith("checkfreq.")
        for frame, _ in traceback.walk_stack(sys._current_frames()[thread])
    )
