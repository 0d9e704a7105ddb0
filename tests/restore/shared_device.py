"""A fake device that several threads use."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from checkfreq.snapshot import backends
from checkfreq.snapshot.device import Pair
from tests.snapshot.fake_device import FakeDevice, Seeded
from tests.snapshot.fake_streams import FakeEvent, FakeStream


class SharedDevice(FakeDevice):
    """One call at a time, from threads that were prepared; it runs while somebody asks for events.

    ``copied_to``: bytes that were queued to be copied from the host.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(Seeded(seed))
        self.copied_to = 0
        self._guard = threading.RLock()
        self._threads = {threading.get_ident()}

    def prepare_thread(self) -> None:
        with self._guard:
            super().prepare_thread()
            self._threads.add(threading.get_ident())

    def copy(self, pairs: Sequence[Pair], *, stream: FakeStream) -> None:
        with self._guard:
            assert threading.get_ident() in self._threads, "a thread that was not prepared"
            super().copy(pairs, stream=stream)
            self.copied_to += sum(one.nbytes for _, one in pairs if self.owner(one) is None)

    def record(self, stream: FakeStream) -> FakeEvent:
        with self._guard:
            return super().record(stream)

    def is_done(self, event: FakeEvent) -> bool:
        with self._guard:
            return super().is_done(event)

    def run_one(self) -> None:
        with self._guard:
            if not self.is_idle:
                super().run_one()


@contextmanager
def registered(fake: FakeDevice) -> Iterator[None]:
    """The fake is the backend of its tensors, for the time of the block."""
    backends.BACKENDS["fake"] = fake
    try:
        yield
    finally:
        del backends.BACKENDS["fake"]
