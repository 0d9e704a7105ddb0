"""Host memory that a fake driver has page-locked, with what the real one refuses.

From the documentation of CUDA: memory is registered once ("HostMemoryAlreadyRegistered"), a copy
lies within one registration or touches none ("InvalidValue"), and a thread whose capture mode is
not relaxed breaks a capture that runs in another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from checkfreq.snapshot.device import DriverError

NO_MEMORY = DriverError("cudaHostRegister", 2, "cudaErrorMemoryAllocation")
OVERLAP = DriverError("cudaHostRegister", 712, "cudaErrorHostMemoryAlreadyRegistered")
UNKNOWN = DriverError("cudaHostUnregister", 713, "cudaErrorHostMemoryNotRegistered")
REFUSED = DriverError("cudaHostUnregister", 999, "cudaErrorUnknown")


class Registrations:
    """Ranges by address. ``fail_at``: the call to ``register`` that fails, from 1.

    ``stuck``: addresses that cannot be unregistered; ``before``: called before each registration
    and ``before_undo`` before it is undone, with its address.
    """

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.fail_at: int | None = None
        self.stuck: set[int] = set()
        self.before: Callable[[int], object] = lambda address: None
        self.before_undo: Callable[[int], object] = lambda address: None
        self._prepared = threading.local()

    @property
    def num_bytes(self) -> int:
        return sum(self.ranges.values())

    def prepare_thread(self) -> None:
        self._prepared.yes = True

    def register(self, address: int, num_bytes: int) -> DriverError | None:
        self._enter("register")
        self.before(address)
        if self.calls.count("register") == self.fail_at:
            return NO_MEMORY
        if self._touched(address, num_bytes):
            return OVERLAP
        self.ranges[address] = num_bytes
        return None

    def unregister(self, address: int) -> DriverError | None:
        self._enter("unregister")
        self.before_undo(address)
        if address in self.stuck:
            return REFUSED
        return None if self.ranges.pop(address, None) else UNKNOWN

    def check_copy(self, host: Tensor) -> None:
        """Raise as PyTorch does for a copy from or to host memory that the driver refuses."""
        assert host.is_contiguous(), "one copy of bytes, or its range is not what was checked"
        begin, num_bytes = host.data_ptr(), host.numel() * host.element_size()
        touched = self._touched(begin, num_bytes)
        if touched and not self._holds(touched[0], begin, num_bytes):
            raise RuntimeError("CUDA error: invalid argument")

    def holder_of(self, tensor: Tensor) -> int | None:
        """The address of the range that a tensor is in; None if it is in none."""
        touched = self._touched(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        return touched[0] if touched else None

    def _holds(self, address: int, begin: int, num_bytes: int) -> bool:
        return address <= begin and begin + num_bytes <= address + self.ranges[address]

    def _touched(self, begin: int, num_bytes: int) -> list[int]:
        return [a for a, size in self.ranges.items() if a < begin + num_bytes and begin < a + size]

    def _enter(self, call: str) -> None:
        # Also since a call that fails leaves its error in its thread, for the next kernel launch.
        assert getattr(self._prepared, "yes", False), "a call in a thread that is not prepared"
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)
