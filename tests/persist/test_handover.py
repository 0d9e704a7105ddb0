"""The new run's end of the hand-over, against a worker that does as the test says."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq.persist import frames as f
from checkfreq.persist.frames import Purpose, Why
from checkfreq.persist.handover import ask
from checkfreq.persist.offer import encode_body
from checkfreq.store.fileops import LocalFileOps
from tests.persist.offers import body_of, snapshot_in

Answer = Callable[[socket.socket, f.Frame], None]


class ScriptedWorker:
    """Listens as a lingering worker does, and answers each frame as it is told."""

    def __init__(self, directory: Path, answer: Answer) -> None:
        self.heard: list[f.Frame] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        LocalFileOps(directory).bind_socket(f.socket_path(directory, 0), self._listener)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._listener.accept()[0] as client:
                    client.settimeout(60.0)
                    self._talk(client)

    def _talk(self, client: socket.socket) -> None:
        reader = f.FrameReader()
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                reader.feed(data)
                while (frame := reader.next_frame()) is not None:
                    self.heard.append(frame)
                    self._answer(client, frame)

    def stop(self) -> None:
        """Returns when every connection is closed; idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60.0)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[Answer], ScriptedWorker]]:
    with contextlib.ExitStack() as stack:

        def start(answer: Answer) -> ScriptedWorker:
            made = ScriptedWorker(tmp_path, answer)
            stack.callback(made.stop)
            return made

        yield start


@pytest.fixture
def slot_fd() -> Iterator[int]:
    fd = os.memfd_create("slot")
    yield fd
    os.close(fd)


def offering(slot_fd: int) -> Answer:
    """Offers one slot."""
    body = body_of(snapshot_in(slot_fd))

    def answer(client: socket.socket, frame: f.Frame) -> None:
        body_fd = encode_body(body)
        socket.send_fds(client, [f.encode(f.Offered(1))], [body_fd, slot_fd])
        os.close(body_fd)

    return answer


def saying(*frames: f.Frame, fds: tuple[int, ...] = ()) -> Answer:
    def answer(client: socket.socket, frame: f.Frame) -> None:
        for one in frames:
            socket.send_fds(client, [f.encode(one)], fds)

    return answer


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "answer",
    [
        saying(f.Taken(1)),
        saying(f.Offered(1)),  # without its descriptors
        saying(f.Offered(0), fds=(0,)),  # what is no body
        saying(f.Offered(0), fds=(0,) * 200),
        lambda client, frame: client.sendall(b"\xff\xff\xff\xff"),
        lambda client, frame: client.shutdown(socket.SHUT_RDWR),
    ],
)
def test_a_worker_that_answers_anything_else_is_left_alone(
    answer: Answer, worker: Callable[[Answer], ScriptedWorker], tmp_path: Path
) -> None:
    before = num_open()
    made = worker(answer)

    assert ask(tmp_path, 0, world=1) is None

    made.stop()
    assert num_open() == before


def test_a_slot_that_was_truncated_is_no_offer(
    worker: Callable[[Answer], ScriptedWorker], slot_fd: int, tmp_path: Path
) -> None:
    worker(offering(slot_fd))
    with ask(tmp_path, 0, world=1) as offer:  # type: ignore[union-attr]
        assert len(offer.slot_fds) == 1
    os.ftruncate(slot_fd, 0)
    assert ask(tmp_path, 0, world=1) is None


def test_memory_that_this_run_cannot_use_is_given_up_and_not_by_who_only_fetches(
    worker: Callable[[Answer], ScriptedWorker], tmp_path: Path
) -> None:
    assert ask(tmp_path, 0, world=1) is None  # no socket
    made = worker(saying(f.Refused(Why.VERSION)))
    assert ask(tmp_path, 0, world=1, purpose=Purpose.FETCH) is None
    assert ask(tmp_path, 0, world=1) is None
    purposes = [frame.purpose for frame in made.heard if isinstance(frame, f.Hello)]
    assert purposes == [Purpose.FETCH, Purpose.TAKE, Purpose.RELEASE]
