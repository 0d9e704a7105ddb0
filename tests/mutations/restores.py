"""Deliberate breaks of restores onto a device."""

from __future__ import annotations

from tests.mutations.edits import Break

TARGET = "checkfreq/restore/device_target.py"
RING = "checkfreq/restore/pinned_ring.py"

ON_FAKE = ("tests/restore/test_device_target.py", "tests/restore/test_device_stream.py")

RESTORES = tuple(
    Break(name, file, ((text, replacement),), gpu, fake=ON_FAKE, why=why)
    for name, file, text, replacement, gpu, why in (
        (
            "copies into live tensors do not wait for what was queued before",
            TARGET,
            "device.wait(self._side, device.record(device.current_stream(self.index)))",
            "pass",
            "test_a_restore_comes_after_the_work_that_was_queued_before_it",
            "",
        ),
        (
            "what is queued next does not wait for copies that are given up",
            TARGET,
            "device.wait(device.current_stream(self.index), last)",
            "pass",
            "test_after_a_deadline_what_is_queued_next_comes_after_the_copies",
            "",
        ),
        (
            "a buffer is used again before it was copied",
            RING,
            "for wait in waits:\n            wait()",
            "pass",
            "test_a_buffer_is_not_used_again_before_it_was_copied",
            "",
        ),
        (
            "a restore ends before its copies",
            TARGET,
            "self._transfers.wait_for(self, self._latest)",
            "pass",
            "test_the_ring_is_unpinned_after_the_copies",
            "",
        ),
        (
            "the event of the first copy stands for all",
            TARGET,
            "self._latest = self._device.record(self._side)",
            "self._latest = self._latest or self._device.record(self._side)",
            "test_a_buffer_is_not_used_again_before_it_was_copied",
            "",
        ),
        (
            "copies without an event count as done",
            TARGET,
            "if self._has_unmarked:",
            "if False:",
            None,
            "a real device that refuses to record events refuses copies too",
        ),
        (
            "the ring is given back while copies run",
            TARGET,
            "self.ring.close() if over else self.ring.abandon()",
            "self.ring.close()",
            "test_the_memory_of_late_copies_is_never_used_again",
            "",
        ),
        (
            "freed tensors are not kept from late copies",
            TARGET,
            "self._device.keep(kept, stream=self._side)",
            "pass",
            "test_after_a_deadline_freed_memory_is_not_reused_on_its_stream_before_the_copies",
            "",
        ),
        (
            "bytes in other memory are not copied to the ring first",
            TARGET,
            "if host is None or not self._transfers.ring.holds(host.data_ptr()):",
            "if host is None:",
            None,
            "the driver itself copies what is not pinned before a call returns",
        ),
        (
            "reading threads are not prepared",
            TARGET,
            "self._device.prepare_thread()",
            "pass",
            None,
            "a restore during a capture is refused by the script that captures",
        ),
    )
)
