"""Messages arrive unchanged, in order, with their descriptors."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from checkfreq.persist import protocol as p


@pytest.fixture
def ends() -> Iterator[tuple[p.Channel, p.Channel]]:
    one, other = (p.Channel(end) for end in socket.socketpair())
    with closing(one), closing(other):
        yield one, other


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


def test_what_a_closed_end_had_sent_is_read_first(ends: tuple[p.Channel, p.Channel]) -> None:
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
