"""A run that ends by itself leaves no memory behind; one that crashes does."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from checkfreq.persist import protocol as p
from checkfreq.persist.exits import LastWord

SCRIPT = """
import os, socket, sys
from checkfreq.persist import protocol as p
from checkfreq.persist.exits import LastWord

class Owner: pass
owner = Owner()
owner.word = LastWord(owner)
owner.word.through(p.Channel(socket.socket(fileno=int(sys.argv[1]))))
"""


class Owner:
    """Something with a last word."""


@pytest.fixture
def ends() -> Iterator[tuple[p.Channel, p.Channel]]:
    ours, theirs = map(p.Channel, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def heard(channel: p.Channel) -> list[p.Message]:
    """Everything that was said until the other end was closed."""
    messages = []
    try:
        while (message := channel.receive(timeout_s=60.0)) is not None:
            messages.append(message)
    except p.ChannelClosedError:
        pass
    return messages


def test_a_dropped_owner_says_it_and_hangs_up(ends: tuple[p.Channel, p.Channel]) -> None:
    ours, theirs = ends
    owner = Owner()
    LastWord(owner).through(theirs)
    del owner
    gc.collect()
    assert heard(ours) == [p.KeepNothing()]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("", [p.KeepNothing()]),
        ("raise RuntimeError", []),
        ("os.kill(os.getpid(), 9)", []),
        ("pid = os.fork()\nif pid == 0: sys.exit()\nos.waitpid(pid, 0); os._exit(0)", []),
    ],
)
def test_only_a_script_that_ends_by_itself_says_it(end: str, expected: list[p.Message]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT + end, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )
    channel = p.Channel(ours)
    assert heard(channel) == expected
    channel.close()
    process.wait(60)
