"""Frames arrive as they were sent, and nothing else passes for one."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.persist import frames as f
from checkfreq.persist.frames import FrameReader, HandoverError, Purpose, Stage, Why

COUNT = st.integers(0, 2**63 - 1)
ARGUMENTS: dict[type, tuple[st.SearchStrategy[object], ...]] = {
    f.Hello: (
        *(st.sampled_from(Purpose), st.text(max_size=50), COUNT, COUNT, st.tuples(COUNT, COUNT)),
    ),
    f.Take: (),
    f.Release: (),
    f.Wait: (),
    f.Offered: (st.integers(0, f.MOST_SLOTS),),
    f.Refused: (st.sampled_from(Why),),
    f.Status: (COUNT, COUNT, st.sampled_from(Stage), COUNT, st.floats(0, 1e9)),
    f.Taken: (COUNT,),
}
FRAMES = st.one_of([st.builds(kind, *given) for kind, given in ARGUMENTS.items()])


@given(frames=st.lists(FRAMES, max_size=4), cut=st.integers(1, 40))
def test_frames_arrive_in_any_pieces(frames: list[f.Frame], cut: int) -> None:
    data, reader, found = b"".join(map(f.encode, frames)), FrameReader(), []
    for start in range(0, len(data), cut):
        reader.feed(data[start : start + cut])
        while (frame := reader.next_frame()) is not None:
            found.append(frame)
    assert found == frames
    assert reader.is_empty


@given(data=st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused_or_wait_for_more(data: bytes) -> None:
    reader = FrameReader()
    reader.feed(data)
    try:
        while reader.next_frame() is not None:
            pass
    except HandoverError:
        pass


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 4000,
        b'["Take", {"more": 1}]',
        b'["Hello", {}]',
        b'["Offered", {"num_slots": 129}]',
        b'["Refused", {"why": "no"}]',
        b"\xff",
    ],
)
def test_what_is_nearly_a_frame_is_refused(text: bytes) -> None:
    with pytest.raises(HandoverError):
        f.decode(text)


@pytest.mark.parametrize("length", [0, f.MOST_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused_before_more_is_read(length: int) -> None:
    reader = FrameReader()
    reader.feed(struct.pack("!I", length))
    with pytest.raises(HandoverError, match=f"a frame of {length} bytes"):
        reader.next_frame()
