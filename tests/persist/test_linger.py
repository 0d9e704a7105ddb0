"""A real worker that lingers after its trainer's death: what it offers, to whom, and its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq import faults
from checkfreq.cli import main
from checkfreq.events import Event, EventLog
from checkfreq.persist import frames as f
from checkfreq.persist import protocol as p
from checkfreq.persist.frames import HandoverError, Purpose, Stage, Why
from checkfreq.persist.handover import Connection, ask, ranks_in, release, status
from checkfreq.persist.linger import Ending, Lingering
from checkfreq.persist.pressure import MemoryPressure
from checkfreq.persist.slots import Slots
from checkfreq.store.fileops import LocalFileOps
from checkfreq.store.manifest import digest_of
from checkfreq.store.store import CheckpointStore
from checkfreq.story.figures import State
from checkfreq.story.live import Live
from checkfreq.types import Role
from tests.persist.conftest import HandMadeSlot, request
from tests.persist.lone import (
    LoneWorker,
    Successor,
    events,
    eventually,
    opening,
    paused_at,
    taken,
    wait_paused,
)
from tests.users import as_another_user, public_folder

Start = Callable[..., LoneWorker]


@pytest.fixture
def chk_dir(tmp_path: Path) -> Path:
    return tmp_path / ("a name that no address of a socket has room for " * 3) / "chk"


@pytest.fixture
def start(chk_dir: Path, slot: HandMadeSlot) -> Iterator[Start]:
    """Start workers that know the slot as their number 0."""
    with contextlib.ExitStack() as stack:

        def begin(**options: object) -> LoneWorker:
            worker = LoneWorker(chk_dir, **options)  # type: ignore[arg-type]
            stack.callback(worker.close)
            worker.share(slot)
            return worker

        yield begin


@pytest.fixture
def lingering(start: Start) -> LoneWorker:
    """A worker that lingers with step 7, which is durable."""
    worker = start()
    worker.commit(7)
    worker.lose_trainer()
    worker.offer().close()
    return worker


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """Ends the pause of ``writing``."""
    return tmp_path / "go"


@pytest.fixture
def writing(start: Start, go: Path) -> LoneWorker:
    """A worker whose trainer is gone, and which stops at the sync of step 8's payload."""
    worker = start(faults=paused_at("commit.sync_payload", go))
    worker.channel.send(request(8))
    worker.channel.send(p.AddMark(8, True, {}))  # nobody waits for its answer any more
    wait_paused(go)
    worker.lose_trainer()
    return worker


def step_of(worker: LoneWorker) -> tuple[int, Stage]:
    """The step that is offered, whose digests are right, and its stage."""
    with worker.offer() as offer:
        (snapshot,) = offer.body.snapshots
        for spec, file in zip(snapshot.layout, snapshot.manifest.files, strict=True):
            for tensor in file.tensors:
                at = spec.slot_offset + tensor.offset
                there = os.pread(offer.slot_fds[0], tensor.num_bytes, at)
                assert digest_of(there) == tensor.digest
        return snapshot.step, snapshot.stage


# ---- what it offers


def test_what_is_durable_is_offered_without_the_lock(lingering: LoneWorker, chk_dir: Path) -> None:
    assert step_of(lingering) == (7, Stage.DURABLE)
    with lingering.offer() as offer:
        assert offer.body.snapshots[0].record == CheckpointStore(chk_dir).manifest(7).encode()
    eventually(lingering.is_free, "the lock is free")
    assert events(chk_dir)[-1] == ("memory_kept", 7)
    assert ranks_in(chk_dir) == [0]
    store = CheckpointStore(chk_dir)
    store.open()  # neither a checkpoint nor rubbish in its socket
    store.prune([7])
    assert store.steps() == [7]
    assert step_of(lingering) == (7, Stage.DURABLE)


def test_a_snapshot_that_is_still_being_written_is_offered_and_sigterm_ends_it_only_afterwards(
    writing: LoneWorker, go: Path, chk_dir: Path
) -> None:
    assert step_of(writing) == (8, Stage.IN_FLIGHT)
    assert not writing.is_free()
    os.kill(writing.process.pid, signal.SIGTERM)
    assert step_of(writing) == (8, Stage.IN_FLIGHT)
    go.touch()
    eventually(lambda: step_of(writing) == (8, Stage.DURABLE), "it is known to be durable")
    eventually(writing.is_free, "the lock is free")

    def ended() -> bool:  # it says nowhere when it begins to listen to the signal
        writing.process.send_signal(signal.SIGTERM)
        return writing.process.poll() is not None

    eventually(ended, "the end")
    assert writing.process.returncode == 0
    assert ranks_in(chk_dir) == []
    assert CheckpointStore(chk_dir).verify(8).step == 8


def test_a_snapshot_that_could_not_be_written_after_the_death_is_offered(
    start: Start, chk_dir: Path, tmp_path: Path
) -> None:
    script = f"{paused_at('commit.sync_payload', tmp_path / 'go')};commit.sync_manifest:raise-EIO"
    worker = start(faults=script)
    worker.channel.send(request(8))
    wait_paused(tmp_path / "go")
    worker.lose_trainer()
    worker.offer().close()

    (tmp_path / "go").touch()

    eventually(lambda: step_of(worker) == (8, Stage.LOST), "the failure")
    assert ("failed", 8) in events(chk_dir)


def test_a_snapshot_that_was_not_digested_is_not_offered(start: Start, chk_dir: Path) -> None:
    worker = start(faults="commit.mkdir:raise-EIO")
    worker.channel.send(request(8))
    assert isinstance(worker.next_reply(), p.Failed)

    worker.lose_trainer()

    with worker.offer() as offer:
        assert offer.body.snapshots == ()


def test_slots_that_the_trainer_was_freeing_when_it_died_are_not_touched(
    start: Start, slot: HandMadeSlot, chk_dir: Path
) -> None:
    worker = start()
    worker.commit(7)
    os.ftruncate(slot.fd, 0)

    worker.lose_trainer()

    assert worker.wait_ended() == 0
    assert ranks_in(chk_dir) == []


def test_a_commit_that_the_trainer_did_not_live_to_record_is_recorded_by_the_worker(
    start: Start, chk_dir: Path
) -> None:
    worker = start()
    recorded = worker.commit(7)
    log = EventLog(chk_dir / "events.jsonl", LocalFileOps(chk_dir), max_bytes=10)
    log.append(Event("committed", 7, {"durable_monotonic_s": recorded.ended_s}))
    worker.commit(8)

    worker.lose_trainer()

    worker.offer().close()
    assert events(chk_dir) == [("committed", 8), ("killed", 8), ("memory_kept", 8)]


# ---- when it does not linger


@pytest.mark.parametrize(
    ("keep_s", "commits", "last"),
    [
        (600.0, True, p.Close()),
        (600.0, True, p.KeepNothing()),
        (600.0, False, None),
        (0.0, True, None),
    ],
    ids=["closed", "ended by itself", "nothing to keep", "may not"],
)
def test_it_ends_where_nothing_is_to_be_kept(
    keep_s: float, commits: bool, last: p.Message | None, start: Start, chk_dir: Path
) -> None:
    worker = start(keep_s=keep_s)
    if commits:
        worker.channel.send(request(7))
    if last is not None:
        worker.channel.send(last)
    worker.lose_trainer()

    assert worker.wait_ended() == 0

    assert CheckpointStore(chk_dir).steps() == ([7] if commits else [])
    assert ranks_in(chk_dir) == []


# ---- being taken


def test_successors_go_on_with_the_slots_as_they_are_and_leave_them_if_they_die(
    lingering: LoneWorker, chk_dir: Path
) -> None:
    with taken(lingering):
        assert ranks_in(chk_dir) == []  # and it dies before it opens
    assert step_of(lingering) == (7, Stage.DURABLE)
    for step in (9, 12):
        with taken(lingering) as successor:
            successor.channel.send(opening(chk_dir))
            assert isinstance(successor.next_reply(), p.Opened)
            assert not lingering.is_free()
            successor.channel.send(request(step))
            assert isinstance(successor.next_reply(), p.Committed)
            if step == 12:
                os.kill(lingering.process.pid, signal.SIGTERM)  # as any worker, it outlives that
                successor.channel.send(p.Close())
                assert lingering.wait_ended() == 0
        if step == 9:
            assert step_of(lingering) == (9, Stage.DURABLE)
    assert CheckpointStore(chk_dir).verify(12).step == 12


def test_a_successor_need_not_wait_for_what_is_in_flight_and_hears_of_its_end(
    writing: LoneWorker, go: Path, chk_dir: Path
) -> None:
    with taken(writing) as successor:
        successor.channel.send(opening(chk_dir))
        assert isinstance(successor.next_reply(), p.Opened)
        go.touch()
        reply = successor.next_reply()

        assert isinstance(reply, p.Committed)
        assert (reply.attempt, reply.step) == ("attempt8", 8)
        successor.channel.send(p.Prune((1,)))
        assert successor.next_reply() == p.Done("Prune", (1,))
    assert CheckpointStore(chk_dir).marks()[8].keep


def test_what_ended_between_offer_and_take_is_told_too(writing: LoneWorker, go: Path) -> None:
    offer = writing.offer()
    go.touch()
    eventually(writing.is_free, "the lock is free")
    successor = Successor(offer.take(stderr_fd=2))
    reply = successor.next_reply()
    assert isinstance(reply, p.Committed)
    assert reply.attempt == "attempt8"
    successor.close()


def test_of_two_runs_only_one_takes_it_and_gets_its_errors(lingering: LoneWorker) -> None:
    log = os.memfd_create("stderr")
    first, second = lingering.offer(), lingering.offer()
    adopted = second.take(stderr_fd=log)
    with pytest.raises(HandoverError):
        first.take(stderr_fd=2)
    there = Path(f"/proc/{lingering.process.pid}/fd/2")
    eventually(lambda: there.stat().st_ino == os.fstat(log).st_ino, "its stderr")
    adopted.channel.close()
    for fd in (adopted.pidfd, log):
        os.close(fd)


# ---- its end


def test_it_ends_after_what_is_being_written(writing: LoneWorker, go: Path, chk_dir: Path) -> None:
    writing.offer().release()
    eventually(lambda: ranks_in(chk_dir) == [], "it has let the memory go")
    go.touch()

    assert writing.wait_ended() == 0

    assert CheckpointStore(chk_dir).verify(8).step == 8


@pytest.mark.parametrize("how", ["release", "other ranks", "remove", "replace", "unlink"])
def test_it_ends_when_another_run_has_no_use_for_it_or_its_directory_or_socket_is_gone(
    how: str, lingering: LoneWorker, chk_dir: Path
) -> None:
    match how:
        case "release":
            assert release(chk_dir, 0)
        case "other ranks":
            assert ask(chk_dir, 0, world=2) is None
        case "remove":
            shutil.rmtree(chk_dir)
        case "unlink":
            f.socket_path(chk_dir, 0).unlink()
        case "replace":
            chk_dir.rename(chk_dir.with_name("moved"))
            chk_dir.mkdir()

    assert lingering.wait_ended() == 0

    if how in ("release", "other ranks"):
        assert ranks_in(chk_dir) == []
        assert events(chk_dir)[-1] == ("memory_given_up", 7)
    if how == "replace":
        assert os.listdir(chk_dir) == []


# ---- whom it answers


def test_other_ranks_can_read_it_and_nothing_else(lingering: LoneWorker, chk_dir: Path) -> None:
    offer = ask(chk_dir, 0, world=1, purpose=Purpose.FETCH)
    assert offer is not None
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(offer.slot_fds[0], 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(offer.slot_fds[0], b"x", 0)
    with pytest.raises(HandoverError):
        offer.take(stderr_fd=2)
    assert step_of(lingering) == (7, Stage.DURABLE)


def test_what_it_holds_and_for_how_long_is_shown(
    lingering: LoneWorker, chk_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = Live(chk_dir).look()
    assert (now.state, now.last_durable_step, now.memory_step) == (State.KILLED, 7, 7)
    for command in ("ls", "show"):
        assert main([command, str(chk_dir)]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert line.startswith("rank 0 in memory: step 7 (durable), ")
        assert line.endswith(f" s more (process {lingering.process.pid})")


AS_A_CLIENT = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(60)
try:
    sock.connect(sys.argv[1])
    sock.sendall(bytes.fromhex(sys.argv[2]))
    print("answered" if sock.recv(1) else "dropped")
except (BrokenPipeError, ConnectionResetError):
    print("dropped")
except OSError as error:
    print(type(error).__name__)
"""


def test_another_user_gets_nothing(slot: HandMadeSlot) -> None:
    with public_folder() as root, contextlib.closing(LoneWorker(root / "chk")) as worker:
        worker.share(slot)
        worker.commit(7)
        worker.lose_trainer()
        worker.offer().close()
        path = f.socket_path(worker.chk_dir, 0)
        greeting = f.encode(hello(worker.chk_dir)).hex()
        client = (sys.executable, "-I", "-c", AS_A_CLIENT, str(path), greeting)
        assert as_another_user(*client).stdout == "PermissionError\n"
        path.chmod(0o666)
        assert as_another_user(*client).stdout == "dropped\n"
        assert step_of(worker) == (7, Stage.DURABLE)


def hello(chk_dir: Path, purpose: Purpose = Purpose.TAKE, **changes: object) -> f.Hello:
    identity = LocalFileOps(chk_dir).identity(chk_dir)
    fields = {"version": f.own_version(), "rank": 0, "world": 1, "directory": identity, **changes}
    return f.Hello(purpose, **fields)  # type: ignore[arg-type]


def test_a_client_is_told_why_it_gets_nothing(lingering: LoneWorker, chk_dir: Path) -> None:
    refusals: list[tuple[dict[str, object], Why]] = [
        ({"version": "0.1"}, Why.VERSION),
        ({"rank": 1}, Why.RANKS),
        ({"world": 2}, Why.RANKS),
        ({"directory": (1, 2)}, Why.DIRECTORY),
    ]
    for changes, why in refusals:
        connection = Connection(f.socket_path(chk_dir, 0))
        connection.send(hello(chk_dir, **changes))
        assert connection.receive(most_fds=0) == f.Refused(why)
        connection.close()


# ---- clients that mean ill


def test_clients_that_say_nothing_keep_nobody_out(lingering: LoneWorker, chk_dir: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(130):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            LocalFileOps(chk_dir).connect_socket(f.socket_path(chk_dir, 0), sock)
        assert status(chk_dir, 0) is None  # too many at once: it is left alone
    eventually(lambda: status(chk_dir, 0), "an answer")


# ---- killed anywhere


def points_of(side: str) -> list[str]:
    return [point for point in faults.POINTS_OF_A_HANDOVER if point.startswith(f"{side}.")]


@pytest.mark.parametrize("point", points_of("linger"))
def test_a_kill_in_a_hand_over_loses_nothing(point: str, start: Start, chk_dir: Path) -> None:
    worker = start(faults=f"{point}:kill-self")
    worker.commit(7)
    worker.lose_trainer()

    def tried() -> bool:
        offer = ask(chk_dir, 0, world=1)
        if offer is not None:
            with contextlib.suppress(HandoverError):
                adopted = offer.take(stderr_fd=2)
                for fd in (adopted.pidfd, *offer.slot_fds.values()):
                    os.close(fd)
                adopted.channel.close()
        return worker.process.poll() is not None

    eventually(tried, "the kill")

    assert worker.process.returncode == -signal.SIGKILL
    assert worker.is_free()
    assert CheckpointStore(chk_dir).verify(7).step == 7


CLIENT = """
import os, sys
from pathlib import Path
from checkfreq.persist.handover import ask
offer = ask(Path(sys.argv[1]), 0, world=1)
offer.take(stderr_fd=2)
"""


def test_a_killed_client_leaves_all_to_the_next(lingering: LoneWorker, chk_dir: Path) -> None:
    for point in points_of("handover"):
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(chk_dir)],
            env={**os.environ, "CHECKFREQ_FAULT": f"{point}:kill-self"},
            timeout=120,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        assert step_of(lingering) == (7, Stage.DURABLE)


# ---- in this process, with made-up circumstances


@pytest.mark.parametrize("why", [Ending.PRESSURE, Ending.TIME, Ending.SOCKET])
def test_it_ends_when_memory_is_short_time_is_up_or_a_newer_worker_has_its_place(
    why: Ending, slot: HandMadeSlot, tmp_path: Path
) -> None:
    slots, ticks = Slots(), iter(range(0, 100_000, 1000))
    slots.note(p.SlotMemory(0, len(slot.memory)))
    slots.note(p.SlotLayout(0, slot.files))
    slots.note(request(3))
    slots.map(p.SlotMemory(0, len(slot.memory)), os.dup(slot.fd))
    left = 0 if why is Ending.PRESSURE else 1 << 40
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX) as newer:
        lingering = Lingering(
            tmp_path,
            slots,
            Role(),
            wake_fd=ours.fileno(),
            until_s=500.0 if why is Ending.TIME else 1e9,
            pressure=MemoryPressure(1, available=lambda: left, files=[]),
            clock=lambda: float(next(ticks)),
        )
        assert lingering.listen()
        if why is Ending.SOCKET:
            LocalFileOps(tmp_path).bind_socket(f.socket_path(tmp_path, 0), newer)
        assert lingering.run() is why
    assert ranks_in(tmp_path) == ([0] if why is Ending.SOCKET else [])
