"""Deliberate breaks of the order of snapshots: each removes one wait, record, keep or order.

A break replaces exact text, found once in its file. ``gpu`` is the test that catches it on a real
device, ``fake`` where to look on the fake one. None: it cannot be seen there, and ``why`` says why.
"""

from __future__ import annotations

from tests.mutations.edits import ON_FAKE, Break
from tests.mutations.restores import RESTORES

ARENA = "checkfreq/snapshot/arena.py"
COPIER = "checkfreq/snapshot/device_copier.py"
ENGINE = "checkfreq/snapshot/device_engine.py"
BACKENDS = "checkfreq/snapshot/backends.py"
CUDA = "checkfreq/snapshot/cuda.py"
HOST = "checkfreq/snapshot/engine.py"
PACKING = "checkfreq/snapshot/packing.py"
PINNING = "checkfreq/snapshot/pinning.py"
SNAPSHOTTER = "checkfreq/snapshot/snapshotter.py"

ON_PINNED = ("tests/snapshot/test_pinning.py",)
ON_CPU = ("tests/snapshot/test_engine.py", "tests/snapshot/test_snapshotter.py")


def _one(
    name: str,
    file: str,
    text: str,
    replacement: str,
    gpu: str | None,
    fake: tuple[str, ...] = ON_FAKE,
) -> Break:
    return Break(name, file, ((text, replacement),), gpu, fake)


_KEEP = "device.keep([copy.source for copy in settled], stream=side)\n            "
_KEEP_ON_HOST = f"{_KEEP}for one in late"
_KEEP_ON_DEVICE = f"{_KEEP}self._pack(only"
_SIDE_ON_HOST = "device.wait(side, device.record(stream))\n        if early:"
_SIDE_ON_DEVICE = "device.wait(side, device.record(stream))\n        if settled:"
_EARLY = "self._pack((*one.volatile, *one.settled), small, stream)"
_BETWEEN = "self._unpack(transfer, early[number - 1], base, stream)"
_STAGED = "self._unpack(transfer, early[-1], base, side)"
_LATE = "self._pack(one.settled, small, side)"
_LATE_TRANSFER = "self._unpack(transfer, one, base, side)"
_CHUNKS = "self._unpack(transfer, only, base, side)"
_FETCH = "self._fetch_readings(transfer)"
_READ_AGAIN = "self._read_again(transfer)\n            self._read = device.record(side)"
_END = "transfer.end = self._end = device.record(side)"
_SYNCHRONIZE = "self._device.synchronize(transfer.end)"

_QUEUED = "test_a_copy_comes_after_the_work_that_was_queued_before_it"
_UPDATE = "test_an_update_behind_the_fence_comes_after_a_late_copy"
_VOLATILE = "test_volatile_state_is_copied_before_what_is_queued_next"
_COMPLETE = "test_a_slot_that_is_reported_complete_is"
_RESIZED = "test_storage_resized_away_is_not_reused_before_a_late_copy"
_FAILED = "test_a_failed_snapshot_is_reported_after_its_copies"
_PINNED = "test_memory_is_pinned_and_unpinned_while_a_graph_is_captured"
_ROUNDS = "test_small_tensors_in_many_rounds_are_those_of_the_boundary"
_SECOND = "test_a_second_snapshot_leaves_the_first_alone"

#: The fence and what lies between two snapshots.
FENCE = (
    _one("the fence does not wait", COPIER, "self._wait(stream, self._read)", "True", _UPDATE),
    _one("a wait is not queued", COPIER, "self._device.wait(stream, event)\n", "\n", _UPDATE),
    _one(
        "the first stream that waits takes the wait with it",
        COPIER,
        "if self._wait(stream, self._read):\n                self._read = None",
        "self._wait(stream, self._read)\n            self._read = None",
        "test_an_update_on_any_stream_comes_after_a_late_copy",
    ),
    _one(
        "the fence waits on the first device only",
        ENGINE,
        "copier.fence()\n",
        "copier.fence()\n                break\n",
        "test_two_devices_in_one_process",
    ),
    _one(
        "the fence does not wait for host tensors",
        ENGINE,
        "self._host.fence(timeout_s=timeout_s)",
        "0.0",
        "test_an_update_of_a_large_host_tensor_comes_after_its_copy",
    ),
    _one(
        "a snapshot does not wait for the one before",
        COPIER,
        "self._wait(stream, self._end)",
        "True",
        _SECOND,
    ),
    _one(
        "a snapshot does not wait for updates on other streams",
        COPIER,
        "self._device.wait(stream, self._device.record(other))",
        "pass",
        "test_an_update_on_a_stream_that_nothing_joins_is_in_the_snapshot",
    ),
    _one(
        "what trains on other streams does not wait for the snapshot",
        COPIER,
        "self._device.wait(other, self._device.record(stream))",
        "pass",
        "test_an_update_on_a_stream_that_nothing_joins_is_in_the_snapshot",
    ),
    _one(
        "only the stream of the latest update is known",
        BACKENDS,
        "if self._is_read:",
        "if True:",
        "test_updates_on_several_streams_are_in_the_snapshot",
    ),
    Break(
        "settled tensors that are not watched are copied late",
        COPIER,
        (("return [copy._replace(settled=False) for copy in copies]", "return copies"),),
        None,
        why="A GPU always has the few bytes that the watch needs.",
    ),
    Break(
        "generators of devices that hold no state are left out",
        "checkfreq/state/capture.py",
        (("devices.update(devices_in_use())", "pass"),),
        "test_a_device_that_holds_no_state_goes_on_with_its_numbers",
        fake=("tests/state/test_device_generators.py",),
    ),
    Break(
        "the snapshotter does not pass the fence on",
        SNAPSHOTTER,
        (("return self._chosen.fence(timeout_s=self._config.barrier_timeout_s)", "return 0.0"),),
        "test_every_checkpoint_is_its_boundary",
        fake=ON_CPU,
    ),
)

#: Snapshots to the host.
TO_HOST = (
    _one(
        "small tensors are staged on the side stream",
        COPIER,
        _EARLY,
        _EARLY.replace("stream)", "side)"),
        _VOLATILE,
    ),
    _one(
        "large volatile tensors are copied on the side stream",
        COPIER,
        "device.copy(self._direct(volatile, base, transfer), stream=stream)",
        "device.copy(self._direct(volatile, base, transfer), stream=side)",
        _VOLATILE,
    ),
    _one(
        "the side stream does not wait for the compute stream",
        COPIER,
        _SIDE_ON_HOST,
        "if early:",
        _QUEUED,
    ),
    Break(
        "the side stream waits for the compute stream as it was before staging",
        COPIER,
        (
            (
                "for number, one in enumerate(early):\n",
                "before = device.record(stream)\n        for number, one in enumerate(early):\n",
            ),
            (_SIDE_ON_HOST, "device.wait(side, before)\n        if early:"),
        ),
        _QUEUED,
    ),
    _one("settled sources are not kept", COPIER, _KEEP_ON_HOST, "for one in late", _RESIZED),
    _one(
        "the update waits for less than the copy",
        COPIER,
        f"device.copy(pairs, stream=side)\n            {_READ_AGAIN}",
        "self._read = device.record(side)\n            device.copy(pairs, stream=side)",
        _UPDATE,
    ),
    _one(
        "settled tensors are copied on the compute stream, and the end is not",
        COPIER,
        "device.copy(pairs, stream=side)",
        "device.copy(pairs, stream=stream)",
        _COMPLETE,
    ),
    _one(
        "the packed bytes are transferred beside the side stream",
        COPIER,
        _STAGED,
        _STAGED.replace("side)", "stream)"),
        _COMPLETE,
    ),
    Break(
        "the end comes before the packed bytes",
        COPIER,
        (
            (f"if early:\n            {_STAGED}\n        ", ""),
            (
                f"self._fetch_readings(transfer)\n        {_END}\n\n    def _packed_in_staging",
                f"self._fetch_readings(transfer)\n        {_END}\n        if early:\n"
                f"            {_STAGED}\n\n    def _packed_in_staging",
            ),
        ),
        _COMPLETE,
    ),
    _one(
        "a round is staged before the one before was transferred",
        COPIER,
        f"if number:\n                {_BETWEEN}\n            {_EARLY}",
        f"{_EARLY}\n            if number:\n                {_BETWEEN}",
        _ROUNDS,
    ),
    _one(
        "a round is transferred beside the stream that stages the next",
        COPIER,
        _BETWEEN,
        _BETWEEN.replace("stream)", "side)"),
        _ROUNDS,
    ),
    _one(
        "later rounds are staged beside the stream that transfers them",
        COPIER,
        _LATE,
        _LATE.replace("side)", "stream)"),
        _ROUNDS,
    ),
    _one(
        "later rounds are transferred beside the stream that stages them",
        COPIER,
        _LATE_TRANSFER,
        _LATE_TRANSFER.replace("side)", "stream)"),
        _ROUNDS,
    ),
    _one(
        "settled sources of later rounds are not kept",
        COPIER,
        _KEEP_ON_HOST,
        "device.keep([copy.source for copy in settled if copy in large], stream=side)\n"
        "            for one in late",
        "test_small_storage_resized_away_is_not_reused_before_a_late_copy",
    ),
    _one(
        "volatile tensors are left to the later rounds",
        PACKING,
        "if one.volatile), default=0)",
        "if False), default=0)",
        _ROUNDS,
    ),
    _one(
        "a plan serves sources of another form",
        PACKING,
        " and _forms(copies) == self._forms",
        "",
        "test_a_tensor_that_is_replaced_by_one_with_other_strides_is_copied_as_it_lies",
    ),
    _one(
        "a staging buffer that is replaced is freed",
        COPIER,
        "transfer.kept.append(packed.memory)\n            early",
        "early",
        "test_a_staging_buffer_that_is_replaced_outlives_its_copies",
    ),
    _one(
        "sources are dropped when all is queued",
        COPIER,
        "transfer.copies, transfer.piece_bytes = copies, piece_bytes",
        "transfer.piece_bytes = piece_bytes",
        "test_a_dropped_source_of_another_stream_outlives_its_copy",
    ),
    _one(
        "strided tensors cross from one registration to the next",
        PACKING,
        "if _crosses(piece.offset, piece.offset + piece.num_bytes, piece_bytes):",
        "if False:",
        "test_copies_into_many_pieces_arrive_whole",
        ON_PINNED,
    ),
    _one(
        "settled tensors are read again after the update may run",
        COPIER,
        f"device.copy(pairs, stream=side)\n            {_READ_AGAIN}",
        "device.copy(pairs, stream=side)\n            self._read = device.record(side)\n"
        "            self._read_again(transfer)",
        "test_every_checkpoint_is_its_boundary",
    ),
)

#: Snapshots to a buffer on the device.
TO_DEVICE = (
    _one(
        "volatile tensors are packed on the side stream",
        COPIER,
        "self._pack(only.volatile, copies, stream)",
        "self._pack(only.volatile, copies, side)",
        _VOLATILE,
    ),
    _one(
        "the side stream does not wait for the compute stream, device snapshot",
        COPIER,
        _SIDE_ON_DEVICE,
        "if settled:",
        _QUEUED,
    ),
    _one(
        "settled sources are not kept, device snapshot",
        COPIER,
        _KEEP_ON_DEVICE,
        "self._pack(only",
        _RESIZED,
    ),
    _one(
        "the update waits for less than the copy, device snapshot",
        COPIER,
        f"self._pack(only.settled, copies, side)\n            {_READ_AGAIN}",
        "self._read = device.record(side)\n            self._pack(only.settled, copies, side)",
        _UPDATE,
    ),
    _one(
        "the update waits for the transfer as well",
        COPIER,
        f"{_CHUNKS}\n        {_FETCH}\n        {_END}",
        f"{_CHUNKS}\n        {_FETCH}\n        {_END}\n        self._read = self._end",
        "test_training_runs_beside_a_late_copy",
    ),
    _one(
        "the buffer is transferred beside the side stream",
        COPIER,
        _CHUNKS,
        _CHUNKS.replace("side)", "stream)"),
        _COMPLETE,
    ),
    _one(
        "the end comes before the transfer",
        COPIER,
        f"{_CHUNKS}\n        {_FETCH}\n        {_END}",
        f"{_END}\n        {_CHUNKS}\n        {_FETCH}",
        _COMPLETE,
    ),
    _one(
        "the device buffer is not kept",
        COPIER,
        "transfer.kept.append(packed.memory)\n            self._through",
        "self._through",
        "test_a_device_buffer_that_is_given_back_outlives_its_copies",
    ),
    _one(
        "chunks cross from one registration to the next",
        PACKING,
        "pairs += cut(*chunk, at=at, piece_bytes=piece_bytes)",
        "pairs.append(chunk)",
        "test_copies_into_many_pieces_arrive_whole",
        ON_PINNED,
    ),
)

#: The end of a snapshot, and its errors.
END = (
    _one("the helper does not wait for the end", ENGINE, _SYNCHRONIZE, "pass", _COMPLETE),
    _one(
        "buffers are released before the end",
        ENGINE,
        "self._complete(snapshot)\n",
        "self._release(snapshot)\n            self._complete(snapshot)\n",
        _COMPLETE,
    ),
    _one(
        "host tensors are copied by the helper",
        ENGINE,
        "for copy in on_host:\n                copy_to_slot(copy, snapshot.slot)",
        "self._helper.submit(lambda: [copy_to_slot(one, snapshot.slot) for one in on_host])",
        "test_host_tensors_are_copied_before_start_returns",
    ),
    _one(
        "a snapshot ends before its host tensors have been copied",
        ENGINE,
        "snapshot.host_copied.wait()",
        "pass",
        "test_an_update_of_a_large_host_tensor_comes_after_its_copy",
    ),
    _one("a failed snapshot has no end", ENGINE, "self._abandon(snapshot)", "pass", _FAILED),
    _one(
        "the end of a failed snapshot is that of the side stream alone",
        COPIER,
        "self._device.wait(self._side, self._device.record(stream))",
        "pass",
        _FAILED,
    ),
)

#: Graph captures.
CAPTURE = (
    _one(
        "the fence waits in a capture",
        ENGINE,
        "if self._copiers and not self._device.is_capturing():",
        "if self._copiers:",
        "test_a_fence_in_a_capture_is_left_out",
    ),
    _one(
        "a snapshot is queued into a capture",
        ENGINE,
        "if self._device.is_capturing():\n            raise",
        "if False:\n            raise",
        "test_a_boundary_in_a_capture_is_refused",
    ),
    _one(
        "waits are measured in a capture",
        COPIER,
        "if self._waits and self._device.is_capturing():",
        "if False:",
        "test_a_fence_in_a_capture_is_left_out",
    ),
    _one(
        "the helper thread is not prepared",
        ENGINE,
        "self._prepare()\n",
        "pass\n",
        "test_a_graph_can_be_captured_while_a_snapshot_is_copied",
    ),
    _one(
        "the pinning thread is not prepared",
        PINNING,
        "self._device.prepare_thread()\n        for done",
        "for done",
        _PINNED,
        ON_PINNED,
    ),
    _one(
        "the unpinning thread is not prepared",
        PINNING,
        "self._device.prepare_thread()\n        return",
        "return",
        _PINNED,
        ON_PINNED,
    ),
    _one(
        "slots that are too small are unpinned by the training thread",
        ARENA,
        "drop = partial(self._drop, old, self._preparation, truncate=True)",
        "self._drop(old, self._preparation, truncate=True)\n        drop = None",
        "test_training_goes_on_while_slots_that_are_too_small_are_unpinned",
        ON_PINNED,
    ),
    _one(
        "slots that are too small are freed after the new ones have memory",
        ARENA,
        "            if self._drop is not None:\n"
        "                self._drop(hurry=self.hurry, stop=self._stop)\n"
        "                self._drop = None\n"
        "            for slot in self.slots:\n"
        "                self._fault_in(slot)\n",
        "            for slot in self.slots:\n"
        "                self._fault_in(slot)\n"
        "            if self._drop is not None:\n"
        "                self._drop(hurry=self.hurry, stop=self._stop)\n"
        "                self._drop = None\n"
        "            for slot in self.slots:\n",
        "test_training_goes_on_while_slots_that_are_too_small_are_unpinned",
        ON_PINNED,
    ),
    Break(
        "the driver is not left alone between pieces that are unpinned",
        PINNING,
        (("hurry.wait(self._clock() - start_s)", "pass"),),
        None,
        ON_PINNED,
        why="a driver shows it only by how long others wait for it",
    ),
)

_OURS = "the fake device has its own of this"

#: What only PyTorch and CUDA do.
ON_CUDA = tuple(
    Break(name, CUDA, ((text, replacement),), gpu, fake=None, why=_OURS)
    for name, text, replacement, gpu in (
        ("waits of a stream", "stream.wait_event(event)", "pass", _UPDATE),
        ("records on a stream", "event.record(stream)", "event.record()", _UPDATE),
        (
            "the host waits in a wait of a stream",
            "stream.wait_event(event)",
            "event.synchronize()",
            "test_neither_start_nor_fence_waits_for_the_device",
        ),
        ("kept storage", "tensor.record_stream(stream)", "pass", _RESIZED),
        ("a blocking wait for an event", "event.synchronize()", "pass", _COMPLETE),
        (
            "captures that other threads may not break",
            "_relax_capture()\n        #",
            "#",
            "test_a_graph_can_be_captured_while_a_snapshot_is_copied",
        ),
    )
)

#: Snapshots of tensors in host memory.
IN_HOST_MEMORY = tuple(
    Break(name, HOST, ((text, replacement),), None, fake=ON_CPU, why="it uses no GPU")
    for name, text, replacement in (
        ("an update does not wait for the copy thread", "self._idle.clear()", "pass"),
        ("volatile tensors are copied late", "if not copy.settled:", "if False:"),
        (
            "the copy counts as done before it is",
            "error = attempted(copy_all)\n        self._idle.set()",
            "self._idle.set()\n        error = attempted(copy_all)\n        ",
        ),
    )
)

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
