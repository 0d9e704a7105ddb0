"""A worker whose trainer can be killed: a process that only lives, and this one at the channel."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from checkfreq.persist import protocol as p
from checkfreq.persist.handover import Adopted, Offer, ask
from checkfreq.persist.launch import worker_command, worker_environment
from checkfreq.types import Role
from tests.persist.conftest import HandMadeSlot, request

DEADLINE_S = 120.0
T = TypeVar("T")


def eventually(found: Callable[[], T | None], what: str) -> T:
    """What ``found`` returns once that is true."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (value := found()):
        assert time.monotonic() < deadline_s, f"{what}: not within {DEADLINE_S:.0f} s"
        time.sleep(0.005)
    return value


def opening(chk_dir: Path, *, keep_s: float = 600.0, role: Role = Role()) -> p.Open:
    """What a trainer says first."""
    return p.Open(str(chk_dir), 120.0, 2, 1 << 20, None, role, keep_in_memory_s=keep_s)


class LoneWorker:
    """A real worker, and the two ends of its trainer: ``body``, a process, and ``channel``."""

    def __init__(
        self,
        chk_dir: Path,
        *,
        faults: str = "",
        fault_log: str | None = None,
        keep_s: float = 600.0,
        role: Role = Role(),
        mirror: object = None,
    ) -> None:
        self.chk_dir = chk_dir
        logged = {} if fault_log is None else {"CHECKFREQ_FAULT_LOG": fault_log}
        self.body = subprocess.Popen(["sleep", "3600"])
        ours, theirs = socket.socketpair()
        pidfd = os.pidfd_open(self.body.pid)
        with theirs:
            self.process = subprocess.Popen(
                worker_command((theirs.fileno(), pidfd, self.body.pid, 0)),
                pass_fds=(theirs.fileno(), pidfd),
                env={**worker_environment(), "CHECKFREQ_FAULT": faults, **logged},
                start_new_session=True,
            )
        os.close(pidfd)
        self.channel = p.Channel(ours)
        opens = opening(chk_dir, keep_s=keep_s, role=role)
        self.channel.send(opens._replace(mirror=mirror))
        assert isinstance(self.next_reply(), p.Opened)

    def share(self, slot: HandMadeSlot, index: int = 0) -> None:
        """Share a slot and its layout."""
        self.channel.send(p.SlotMemory(index, len(slot.memory)), fd=slot.fd)
        self.channel.send(p.SlotLayout(index, slot.files))

    def next_reply(self) -> p.Message:
        """The worker's next reply."""
        reply = self.channel.receive(timeout_s=DEADLINE_S)
        assert reply is not None, "the worker did not answer"
        return reply

    def commit(self, step: int, **fields: object) -> p.Committed:
        """Have a checkpoint made."""
        self.channel.send(request(step, **fields))
        reply = self.next_reply()
        assert isinstance(reply, p.Committed)
        return reply

    def lose_trainer(self) -> None:
        """The trainer is killed."""
        self.body.kill()
        self.body.wait()
        self.channel.close()

    def offer(self) -> Offer:
        """What it holds, once it listens."""
        return eventually(lambda: ask(self.chk_dir, 0, world=1), "an offer")

    def take(self, *, stderr_fd: int = 2) -> Adopted:
        """Become its trainer; the slots' descriptors are closed."""
        offer = self.offer()
        fds = list(offer.slot_fds.values())
        adopted = offer.take(stderr_fd=stderr_fd)
        for fd in fds:
            os.close(fd)
        return adopted

    def wait_ended(self) -> int:
        """Its exit code."""
        return self.process.wait(DEADLINE_S)

    def is_free(self) -> bool:
        """Whether it has let go of the directory."""
        lock = self.chk_dir / ".lock"
        found = subprocess.run(["flock", "-n", str(lock), "true"], check=False)
        return found.returncode == 0

    def close(self) -> None:
        """End everything."""
        self.process.kill()
        self.process.wait()
        self.body.kill()
        self.body.wait()
        self.channel.close()


class Successor:
    """A trainer that took a worker."""

    def __init__(self, adopted: Adopted) -> None:
        self._adopted = adopted
        self.channel = adopted.channel

    def next_reply(self) -> p.Message:
        """The worker's next reply."""
        reply = self.channel.receive(timeout_s=DEADLINE_S)
        assert reply is not None, "the worker did not answer"
        return reply

    def close(self) -> None:
        """Vanish."""
        self.channel.close()
        with contextlib.suppress(OSError):
            os.close(self._adopted.pidfd)


@contextlib.contextmanager
def taken(worker: LoneWorker) -> Iterator[Successor]:
    """A successor that has taken the worker, and has not said anything yet."""
    successor = Successor(worker.take())
    try:
        yield successor
    finally:
        successor.close()


def events(chk_dir: Path) -> list[tuple[str, int]]:
    """Kinds and steps of the events in a directory's log."""
    found = map(json.loads, (chk_dir / "events.jsonl").read_text().splitlines())
    return [(event["kind"], event["step"]) for event in found]


def paused_at(point: str, file: Path) -> str:
    """A script that stops the worker there until `go_on`."""
    return f"{point}:pause-{file}"


def wait_paused(file: Path) -> None:
    """Return once it has stopped."""
    eventually(lambda: Path(f"{file}.reached").exists(), "the pause")
