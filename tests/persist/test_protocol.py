"""Messages arrive unchanged, in order, with their descriptors."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from types import NoneType, UnionType
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.persist import protocol as p
from checkfreq.types import ContentId, FileSpec, Role, TensorSpec

TEXT = st.text(max_size=20)
NUMBER = st.integers(0, 2**53)
FLAG = st.booleans()
METRICS = st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3)
STEPS = st.lists(NUMBER, max_size=4).map(tuple)
JSON = st.recursive(
    st.none() | FLAG | NUMBER | TEXT | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TENSORS = st.lists(
    st.builds(TensorSpec, TEXT, TEXT, st.lists(NUMBER, max_size=3).map(tuple), NUMBER, NUMBER),
    max_size=3,
).map(tuple)
FILES = st.lists(st.builds(FileSpec, TEXT, NUMBER, NUMBER, NUMBER, TENSORS), max_size=3).map(tuple)
#: What a field of each kind may hold; one of another kind, or of any, holds JSON.
VALUES: dict[object, st.SearchStrategy[object]] = {
    str: TEXT,
    int: NUMBER,
    float: st.floats(0, 1e9),
    bool: FLAG,
    dict[str, float]: METRICS,
    dict[str, str]: st.dictionaries(TEXT, TEXT, max_size=2),
    dict[str, ContentId]: st.dictionaries(TEXT, st.tuples(TEXT, NUMBER), max_size=2),
    tuple[int, ...]: STEPS,
    tuple[str, ...]: st.lists(TEXT, max_size=3).map(tuple),
    tuple[FileSpec, ...]: FILES,
    Role: st.builds(Role, NUMBER, NUMBER, STEPS, FLAG),
}


def values_of(hint: object) -> st.SearchStrategy[object]:
    """Of a field with this annotation."""
    if isinstance(hint, UnionType):
        return st.one_of(
            [st.none() if one is NoneType else values_of(one) for one in hint.__args__]
        )
    return JSON if hint is Any else VALUES[hint]


MESSAGES = st.one_of(
    [st.builds(kind, *map(values_of, get_type_hints(kind).values())) for kind in p.Message.__args__]
)


@pytest.fixture
def ends() -> Iterator[tuple[p.Channel, p.Channel]]:
    one, other = (p.Channel(end) for end in socket.socketpair())
    with closing(one), closing(other):
        yield one, other


@given(messages=st.lists(MESSAGES, max_size=5))
def test_a_channel_keeps_their_order(messages: list[p.Message]) -> None:
    one, other = (p.Channel(end) for end in socket.socketpair())
    with closing(one), closing(other):
        for message in messages:
            one.send(message)
        assert [other.receive(timeout_s=1.0) for _ in messages] == messages
        assert other.receive(timeout_s=0.0) is None


def test_a_message_larger_than_any_buffer_goes_through() -> None:
    one, other = (p.Channel(end) for end in socket.socketpair())
    with closing(one), closing(other):
        message = p.Waiting("y" * (4 << 20))
        sender = threading.Thread(target=one.send, args=(message,))
        sender.start()
        assert other.receive(timeout_s=30.0) == message
        sender.join()


def test_descriptors_arrive_with_their_messages(ends: tuple[p.Channel, p.Channel]) -> None:
    one, other = ends
    for slot in (0, 1):
        fd = os.memfd_create(f"slot{slot}")
        os.write(fd, b"%d" % slot)
        one.send(p.SlotMemory(slot, 1), fd=fd)
        os.close(fd)
    for slot in (0, 1):
        assert other.receive(timeout_s=1.0) == p.SlotMemory(slot, 1)
        fd = other.take_fd()
        assert os.pread(fd, 1, 0) == b"%d" % slot
        os.close(fd)


def test_what_a_closed_end_had_sent_is_read_before_the_close_is_reported(
    ends: tuple[p.Channel, p.Channel],
) -> None:
    one, other = ends
    one.send(p.Opened(1))
    one.close()
    assert other.receive(timeout_s=1.0) == p.Opened(1)
    with pytest.raises(p.ChannelClosedError, match="closed the channel"):
        other.receive(timeout_s=1.0)
    with pytest.raises(p.ChannelClosedError, match="cannot send Close"):
        other.send(p.Close())


def test_sending_to_a_side_that_never_reads_ends_in_an_error() -> None:
    ours, theirs = socket.socketpair()
    one = p.Channel(ours, send_timeout_s=0.01)
    with closing(one), theirs, pytest.raises(p.ChannelClosedError, match="cannot send Waiting"):
        one.send(p.Waiting("z" * (8 << 20)))
