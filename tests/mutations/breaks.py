"""Deliberate breaks of the order of snapshots: each removes one wait, record, keep or order.

Written as in edits.py.
"""

from __future__ import annotations

from tests.mutations.edits import breaks_in
from tests.mutations.restores import RESTORES

#: The fence and what lies between two snapshots.
FENCE = breaks_in("""
@ snapshot/device_copier.py | fake
= test_an_update_behind_the_fence_comes_after_a_late_copy
# the fence does not wait
- self._wait(stream, self._read)
+ True
# a wait is not queued
- self._device.wait(stream, event)
-
+
+
= test_an_update_on_any_stream_comes_after_a_late_copy
# the first stream that waits takes the wait with it
- if self._wait(stream, self._read):
-                 self._read = None
+ self._wait(stream, self._read)
+             self._read = None
= test_a_second_snapshot_leaves_the_first_alone
# a snapshot does not wait for the one before
- self._wait(stream, self._end)
+ True
= test_an_update_on_a_stream_that_nothing_joins_is_in_the_snapshot
# a snapshot does not wait for updates on other streams
- self._device.wait(stream, self._device.record(other))
+ pass
# what trains on other streams does not wait for the snapshot
- self._device.wait(other, self._device.record(stream))
+ pass
= none: A GPU always has the few bytes that the watch needs.
# settled tensors that are not watched are copied late
- return [copy._replace(settled=False) for copy in copies]
+ return copies
@ snapshot/device_engine.py | fake
= test_two_devices_in_one_process
# the fence waits on the first device only
- copier.fence()
-
+ copier.fence()
+                 break
+
= test_an_update_of_a_large_host_tensor_comes_after_its_copy
# the fence does not wait for host tensors
- self._host.fence(timeout_s=timeout_s)
+ 0.0
@ snapshot/backends.py | fake
= test_updates_on_several_streams_are_in_the_snapshot
# only the stream of the latest update is known
- if self._is_read:
+ if True:
@ state/capture.py | generators
= test_a_device_that_holds_no_state_goes_on_with_its_numbers
# generators of devices that hold no state are left out
- devices.update(devices_in_use())
+ pass
@ snapshot/snapshotter.py | cpu
= test_every_checkpoint_is_its_boundary
# the snapshotter does not pass the fence on
- return self._chosen.fence(timeout_s=self._config.barrier_timeout_s)
+ return 0.0
""")

#: Snapshots to the host.
TO_HOST = breaks_in("""
@ snapshot/device_copier.py | fake
= test_volatile_state_is_copied_before_what_is_queued_next
# small tensors are staged on the side stream
- self._pack((*one.volatile, *one.settled), small, stream)
+ self._pack((*one.volatile, *one.settled), small, side)
# large volatile tensors are copied on the side stream
- device.copy(self._direct(volatile, base, transfer), stream=stream)
+ device.copy(self._direct(volatile, base, transfer), stream=side)
= test_a_copy_comes_after_the_work_that_was_queued_before_it
# the side stream does not wait for the compute stream
- device.wait(side, device.record(stream))
-         if early:
+ if early:
# the side stream waits for the compute stream as it was before staging
- for number, one in enumerate(early):
-
+ before = device.record(stream)
+         for number, one in enumerate(early):
+
- device.wait(side, device.record(stream))
-         if early:
+ device.wait(side, before)
+         if early:
= test_storage_resized_away_is_not_reused_before_a_late_copy
# settled sources are not kept
- device.keep([copy.source for copy in settled], stream=side)
-             for one in late
+ for one in late
= test_an_update_behind_the_fence_comes_after_a_late_copy
# the update waits for less than the copy
- device.copy(pairs, stream=side)
-             self._read_again(transfer)
-             self._read = device.record(side)
+ self._read = device.record(side)
+             device.copy(pairs, stream=side)
= test_a_slot_that_is_reported_complete_is
# settled tensors are copied on the compute stream, and the end is not
- device.copy(pairs, stream=side)
+ device.copy(pairs, stream=stream)
# the packed bytes are transferred beside the side stream
- self._unpack(transfer, early[-1], base, side)
+ self._unpack(transfer, early[-1], base, stream)
# the end comes before the packed bytes
- if early:
-             self._unpack(transfer, early[-1], base, side)
+ pass
- transfer.end = self._end = device.record(side)
-
-     def _packed_in_staging
+ transfer.end = self._end = device.record(side)
+         if early:
+             self._unpack(transfer, early[-1], base, side)
+
+     def _packed_in_staging
= test_small_tensors_in_many_rounds_are_those_of_the_boundary
# a round is staged before the one before was transferred
- if number:
-                 self._unpack(transfer, early[number - 1], base, stream)
-             self._pack((*one.volatile, *one.settled), small, stream)
+ self._pack((*one.volatile, *one.settled), small, stream)
+             if number:
+                 self._unpack(transfer, early[number - 1], base, stream)
# a round is transferred beside the stream that stages the next
- self._unpack(transfer, early[number - 1], base, stream)
+ self._unpack(transfer, early[number - 1], base, side)
# later rounds are staged beside the stream that transfers them
- self._pack(one.settled, small, side)
+ self._pack(one.settled, small, stream)
# later rounds are transferred beside the stream that stages them
- self._unpack(transfer, one, base, side)
+ self._unpack(transfer, one, base, stream)
= test_small_storage_resized_away_is_not_reused_before_a_late_copy
# settled sources of later rounds are not kept
- device.keep([copy.source for copy in settled], stream=side)
-             for one in late
+ device.keep([copy.source for copy in settled if copy in large], stream=side)
+             for one in late
= test_a_staging_buffer_that_is_replaced_outlives_its_copies
# a staging buffer that is replaced is freed
- transfer.kept.append(packed.memory)
-             early
+ early
= test_a_dropped_source_of_another_stream_outlives_its_copy
# sources are dropped when all is queued
- transfer.copies, transfer.piece_bytes = copies, piece_bytes
+ transfer.piece_bytes = piece_bytes
= test_every_checkpoint_is_its_boundary
# settled tensors are read again after the update may run
- device.copy(pairs, stream=side)
-             self._read_again(transfer)
-             self._read = device.record(side)
+ device.copy(pairs, stream=side)
+             self._read = device.record(side)
+             self._read_again(transfer)
@ snapshot/packing.py | fake
= test_small_tensors_in_many_rounds_are_those_of_the_boundary
# volatile tensors are left to the later rounds
- if one.volatile), default=0)
+ if False), default=0)
= test_a_tensor_that_is_replaced_by_one_with_other_strides_is_copied_as_it_lies
# a plan serves sources of another form
-  and _forms(copies) == self._forms
+
@ snapshot/packing.py | pinned
= test_copies_into_many_pieces_arrive_whole
# strided tensors cross from one registration to the next
- if _crosses(piece.offset, piece.offset + piece.num_bytes, piece_bytes):
+ if False:
""")

#: Snapshots to a buffer on the device.
TO_DEVICE = breaks_in("""
@ snapshot/device_copier.py | fake
= test_volatile_state_is_copied_before_what_is_queued_next
# volatile tensors are packed on the side stream
- self._pack(only.volatile, copies, stream)
+ self._pack(only.volatile, copies, side)
= test_a_copy_comes_after_the_work_that_was_queued_before_it
# the side stream does not wait for the compute stream, device snapshot
- device.wait(side, device.record(stream))
-         if settled:
+ if settled:
= test_storage_resized_away_is_not_reused_before_a_late_copy
# settled sources are not kept, device snapshot
- device.keep([copy.source for copy in settled], stream=side)
-             self._pack(only
+ self._pack(only
= test_an_update_behind_the_fence_comes_after_a_late_copy
# the update waits for less than the copy, device snapshot
- self._pack(only.settled, copies, side)
-             self._read_again(transfer)
-             self._read = device.record(side)
+ self._read = device.record(side)
+             self._pack(only.settled, copies, side)
= test_training_runs_beside_a_late_copy
# the update waits for the transfer as well
- self._unpack(transfer, only, base, side)
-         self._fetch_readings(transfer)
-         transfer.end = self._end = device.record(side)
+ self._unpack(transfer, only, base, side)
+         self._fetch_readings(transfer)
+         transfer.end = self._end = device.record(side)
+         self._read = self._end
= test_a_slot_that_is_reported_complete_is
# the buffer is transferred beside the side stream
- self._unpack(transfer, only, base, side)
+ self._unpack(transfer, only, base, stream)
# the end comes before the transfer
- self._unpack(transfer, only, base, side)
-         self._fetch_readings(transfer)
-         transfer.end = self._end = device.record(side)
+ transfer.end = self._end = device.record(side)
+         self._unpack(transfer, only, base, side)
+         self._fetch_readings(transfer)
= test_a_device_buffer_that_is_given_back_outlives_its_copies
# the device buffer is not kept
- transfer.kept.append(packed.memory)
-             self._through
+ self._through
@ snapshot/packing.py | pinned
= test_copies_into_many_pieces_arrive_whole
# chunks cross from one registration to the next
- pairs += cut(*chunk, at=at, piece_bytes=piece_bytes)
+ pairs.append(chunk)
""")

#: The end of a snapshot, and its errors.
END = breaks_in("""
@ snapshot/device_engine.py | fake
= test_a_slot_that_is_reported_complete_is
# the helper does not wait for the end
- self._device.synchronize(transfer.end)
+ pass
# buffers are released before the end
- self._complete(snapshot)
-
+ self._release(snapshot)
+             self._complete(snapshot)
+
= test_host_tensors_are_copied_before_start_returns
# host tensors are copied by the helper
- for copy in on_host:
-                 copy_to_slot(copy, snapshot.slot)
+ self._helper.submit(lambda: [copy_to_slot(one, snapshot.slot) for one in on_host])
= test_an_update_of_a_large_host_tensor_comes_after_its_copy
# a snapshot ends before its host tensors have been copied
- snapshot.host_copied.wait()
+ pass
= test_a_failed_snapshot_is_reported_after_its_copies
# a failed snapshot has no end
- self._abandon(snapshot)
+ pass
@ snapshot/device_copier.py | fake
= test_a_failed_snapshot_is_reported_after_its_copies
# the end of a failed snapshot is that of the side stream alone
- self._device.wait(self._side, self._device.record(stream))
+ pass
""")

#: Graph captures.
CAPTURE = breaks_in("""
@ snapshot/device_engine.py | fake
= test_a_fence_in_a_capture_is_left_out
# the fence waits in a capture
- if self._copiers and not self._device.is_capturing():
+ if self._copiers:
= test_a_boundary_in_a_capture_is_refused
# a snapshot is queued into a capture
- if self._device.is_capturing():
-             raise
+ if False:
+             raise
= test_a_graph_can_be_captured_while_a_snapshot_is_copied
# the helper thread is not prepared
- self._prepare()
-
+ pass
+
@ snapshot/device_copier.py | fake
= test_a_fence_in_a_capture_is_left_out
# waits are measured in a capture
- if self._waits and self._device.is_capturing():
+ if False:
@ snapshot/pinning.py | pinned
= test_memory_is_pinned_and_unpinned_while_a_graph_is_captured
# the pinning thread is not prepared
- self._device.prepare_thread()
-         for done
+ for done
# the unpinning thread is not prepared
- self._device.prepare_thread()
-         return
+ return
= none: a driver shows it only by how long others wait for it
# the driver is not left alone between pieces that are unpinned
- hurry.wait(self._clock() - start_s)
+ pass
@ snapshot/arena.py | pinned
= test_training_goes_on_while_slots_that_are_too_small_are_unpinned
# slots that are too small are unpinned by the training thread
- drop = partial(self._drop, old, self._preparation, truncate=True)
+ self._drop(old, self._preparation, truncate=True)
+         drop = None
# slots that are too small are freed after the new ones have memory
-             if self._drop is not None:
-                 self._drop(hurry=self.hurry, stop=self._stop)
-                 self._drop = None
-             for slot in self.slots:
-                 self._fault_in(slot)
-
+             for slot in self.slots:
+                 self._fault_in(slot)
+             if self._drop is not None:
+                 self._drop(hurry=self.hurry, stop=self._stop)
+                 self._drop = None
+             for slot in self.slots:
+
""")

#: What only PyTorch and CUDA do.
ON_CUDA = breaks_in("""
@ snapshot/cuda.py | nowhere
= test_an_update_behind_the_fence_comes_after_a_late_copy
# waits of a stream
- stream.wait_event(event)
+ pass
# records on a stream
- event.record(stream)
+ event.record()
= test_neither_start_nor_fence_waits_for_the_device
# the host waits in a wait of a stream
- stream.wait_event(event)
+ event.synchronize()
= test_storage_resized_away_is_not_reused_before_a_late_copy
# kept storage
- tensor.record_stream(stream)
+ pass
= test_a_slot_that_is_reported_complete_is
# a blocking wait for an event
- event.synchronize()
+ pass
= test_a_graph_can_be_captured_while_a_snapshot_is_copied
# captures that other threads may not break
- _relax_capture()
-         #
+ #
""")

#: Snapshots of tensors in host memory.
IN_HOST_MEMORY = breaks_in("""
@ snapshot/engine.py | cpu
= none: it uses no GPU
# an update does not wait for the copy thread
- self._idle.clear()
+ pass
# volatile tensors are copied late
- if not copy.settled:
+ if False:
# the copy counts as done before it is
- error = attempted(copy_all)
-         self._idle.set()
+ self._idle.set()
+         error = attempted(copy_all)
""")

GROUPS = {
    "fence": FENCE,
    "to-host": TO_HOST,
    "to-device": TO_DEVICE,
    "end": END,
    "capture": CAPTURE,
    "cuda": ON_CUDA,
    "host-memory": IN_HOST_MEMORY,
    "restores": RESTORES,
}
BREAKS = tuple(one for group in GROUPS.values() for one in group)
