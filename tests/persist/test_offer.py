"""An offer is what was offered; one that is damaged or made up is refused, never believed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkfreq.errors import CorruptCheckpointError
from checkfreq.persist.frames import HandoverError
from checkfreq.persist.offer import (
    Body,
    Snapshot,
    decode_body,
    encode_body,
)
from checkfreq.types import Json, Role
from tests.persist.conftest import PAGE, request
from tests.persist.offers import body_of, changed, snapshot_in


@pytest.fixture
def snapshot() -> Iterator[Snapshot]:
    fd = os.memfd_create("slot")
    yield snapshot_in(fd)
    os.close(fd)


def decoded(data: bytes) -> Body:
    """The body in ``data``, through memory as it comes."""
    fd = os.memfd_create("offer")
    try:
        os.write(fd, data)
        return decode_body(fd)
    finally:
        os.close(fd)


def encoded(body: Body) -> bytes:
    fd = encode_body(body)
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def with_text(body: Body, change: dict[str, Json]) -> bytes:
    """The bytes of a body whose first snapshot, or whose whole text, says something else."""
    data = encoded(body)
    (length,) = struct.unpack_from("!Q", data)
    value = json.loads(data[8 : 8 + length])
    value["snapshots"][0].update({k: v for k, v in change.items() if k in value["snapshots"][0]})
    value.update({k: v for k, v in change.items() if k in value})
    text = json.dumps(value).encode()
    return struct.pack("!Q", len(text)) + text + data[8 + length :]


def test_an_offer_arrives_as_it_was_made(snapshot: Snapshot) -> None:
    body = Body(Role(1, 4, (0, 1), True), ((0, snapshot.slot_bytes), (5, 4096)), (snapshot,))

    assert decoded(encoded(body)) == body


def test_a_snapshot_tells_its_layout_and_the_request_that_made_it(snapshot: Snapshot) -> None:
    assert snapshot.manifest.step == 7
    (file,) = snapshot.layout
    assert (file.slot_offset, file.num_bytes) == (PAGE, snapshot.manifest.num_bytes)
    assert snapshot.request(rank=0) == request(7, keep=True, metrics={"loss": 0.5})


def test_nobody_changes_an_offer_that_was_sent(snapshot: Snapshot) -> None:
    fd = encode_body(body_of(snapshot))
    try:
        for change in (lambda: os.ftruncate(fd, 0), lambda: os.pwrite(fd, b"x", 0)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"slot": 9},
        {"stage": "done"},
        {"slot_offsets": {"f": -1}},
        {"extras": {}},
        {"record_bytes": 2**40},
        {"slots": [[0, 1], [0, 1]]},
        {"slots": [[number, 4096] for number in range(200)]},
        {"role": [3, 2, [3], False]},
        {"snapshots": {}},
    ],
    ids=str,
)
def test_an_offer_that_cannot_be_is_refused(change: dict[str, Json], snapshot: Snapshot) -> None:
    with pytest.raises(HandoverError):
        decoded(with_text(body_of(snapshot), change))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("supersede_after", -2),
        ("keep", 1),
        ("part_timeout_s", float("inf")),
    ],
)
def test_an_impossible_request_is_refused(name: str, value: Json, snapshot: Snapshot) -> None:
    extras = {**snapshot.extras, name: value}
    with pytest.raises(HandoverError, match=name):
        decoded(with_text(body_of(snapshot), {"extras": extras}))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_offer_damaged_anywhere_is_refused_or_its_records_are(
    data: st.DataObject, snapshot: Snapshot
) -> None:
    body = body_of(snapshot)
    sound = encoded(body)
    at = data.draw(st.integers(0, len(sound) - 1))
    damaged = bytearray(sound)
    damaged[at] ^= data.draw(st.integers(1, 255))
    kept = data.draw(st.integers(0, len(sound)))
    for made in (bytes(damaged), sound[:kept]):
        try:
            found = decoded(made)
            for one in found.snapshots:
                assert len(one.layout) == len(one.manifest.files)
                assert one.request(rank=0).attempt == one.manifest.attempt
        except (HandoverError, CorruptCheckpointError):
            pass


def test_a_body_that_no_memory_could_hold_is_refused_unread() -> None:
    fd = os.memfd_create("offer")
    os.ftruncate(fd, 1 << 40)  # sparse
    try:
        with pytest.raises(HandoverError, match="an offer of 1099511627776 bytes"):
            decode_body(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"step": 8}, "step"),
        ({"slot_offsets": {}}, "files"),
        ({"slot_offsets": {"model.safetensors": 1}}, "slot_offset"),
        ({"slot_bytes": PAGE}, "end of its files"),
        ({"record": b"{}"}, "first line"),
    ],
)
def test_a_record_that_does_not_fit_its_slot_is_damage(
    change: dict[str, Json], check: str, snapshot: Snapshot
) -> None:
    with pytest.raises(CorruptCheckpointError, match=check):
        _ = changed(snapshot, **change).layout
