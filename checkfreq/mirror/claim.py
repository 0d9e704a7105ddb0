"""``claim.json``: one run at a time writes under a prefix.

The claim is created if there is none. One that is there is taken over at once if it is this run's
own (the same checkpoint directory: its lock allows one worker), and otherwise once it has not been
renewed for `LEASE_S`: its run is dead. A claim that is renewed meanwhile belongs to a live run, and
this one is refused until that one gives it up, or dies. Whether a service honours conditions is
found out once, by asking for what must be refused; where it does not, a claim is read back before
it is trusted. A service that does not return parts of objects is no mirror, since nothing could be
restored from it. Ages are told by the service's own clock, or by waiting: the clocks of two
machines are not compared.

Belongs to the mirror's thread.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from checkfreq.errors import CorruptCheckpointError, StorageError
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import CLAIM, Claim

logger = logging.getLogger(__name__)

#: A run that has not renewed its claim for so long is dead.
LEASE_S = 60.0
#: How often a live run renews its own.
RENEW_EVERY_S = 15.0


class Ownership(enum.Enum):
    """Whether this run may write."""

    OURS = "ours"
    #: Another run's claim, which may be dead: ask again.
    WAITING = "waiting"
    #: Another run's claim, which was renewed: ask again, less often.
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Which conditional writes a service honours."""

    create: bool
    replace: bool


class ClaimKeeper:
    """Takes, renews and gives up this run's claim; ``clock`` is monotonic, ``wall`` Unix time."""

    def __init__(
        self,
        remote: RemoteObjects,
        *,
        run: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._remote = remote
        self._clock = clock
        self._wall = wall
        now_s = wall()
        session = uuid.uuid4().hex
        self._ours = Claim(run, session, socket.gethostname(), os.getpid(), now_s, now_s)
        self._conditions: Conditions | None = None
        self._e_tag: str | None = None
        self._renewed_s: float | None = None
        #: Another run's claim, since when it is watched, and how much longer it may be alive.
        self._watched: tuple[bytes, float, float] | None = None
        #: Whether another run was seen to be alive, and may have uploaded beside this one.
        self.is_contested = False
        self.holder = ""

    @property
    def is_ours(self) -> bool:
        """Whether the claim was taken and has not been lost."""
        return self._renewed_s is not None

    # ---- taking

    def take(self) -> Ownership:
        """Take the claim if it may be taken; raises like `RemoteObjects`."""
        if self.is_ours:
            return Ownership.OURS
        self._probe()
        there = self._read()
        if there is None:
            return self._create()
        data, claim, e_tag = there
        if claim is not None and claim.run == self._ours.run:
            return self._seize(e_tag)
        return self._watch(data, claim, e_tag)

    def _create(self) -> Ownership:
        try:
            self._written(self._remote.create(CLAIM, self._encoded()))
        except FileExistsError:
            return self._after_conflict()
        return self._confirmed(is_certain=self._known_conditions.create)

    def _seize(self, e_tag: str | None) -> Ownership:
        """Write over a claim that is dead, or this run's own."""
        try:
            self._write_over(e_tag)
        except FileExistsError:
            return self._after_conflict()
        return self._confirmed(is_certain=self._known_conditions.replace)

    def _watch(self, data: bytes, claim: Claim | None, e_tag: str | None) -> Ownership:
        self.holder = "an unreadable claim" if claim is None else str(claim)
        now_s = self._clock()
        if self._watched is None:
            self._watched = data, now_s, LEASE_S - self._age_s()
        seen, since_s, left_s = self._watched
        if data != seen:
            self._watched, self.is_contested = (data, now_s, LEASE_S), True
        elif now_s - since_s >= left_s:
            self._watched = None
            return self._seize(e_tag)
        return Ownership.REFUSED if self.is_contested else Ownership.WAITING

    def _age_s(self) -> float:
        """How long ago the claim was written, by the service's clock; 0.0 if it cannot be told."""
        head = self._remote.head(CLAIM)
        probe = self._remote.head(self._probe_key)
        if head is None or probe is None:
            return 0.0
        return max(0.0, (probe.modified - head.modified).total_seconds())

    def _after_conflict(self) -> Ownership:
        """Somebody wrote meanwhile: this very request, answered with an error, or another run."""
        there = self._read()
        if there is not None and there[1] == self._ours:
            self._written(there[2])
            return Ownership.OURS
        return Ownership.WAITING

    def _confirmed(self, *, is_certain: bool) -> Ownership:
        if is_certain or self._is_still_there():
            self._remove_probe()
            return Ownership.OURS
        self._renewed_s = None
        return Ownership.WAITING

    # ---- keeping

    @property
    def is_due(self) -> bool:
        """Whether the claim is to be renewed: every `RENEW_EVERY_S`."""
        return self._renewed_s is not None and self._clock() - self._renewed_s >= RENEW_EVERY_S

    def renew_if_due(self) -> bool:
        """Renew the claim if that is due; False once it is another's."""
        return self.renew() if self.is_due else self.is_ours

    def renew(self) -> bool:
        """Renew the claim; False if it is another's now, and this run must not write."""
        try:
            if not self._known_conditions.replace and not self._is_still_there():
                raise FileExistsError(CLAIM)
            self._write_over(self._e_tag)
        except FileExistsError:
            if self._after_conflict() is not Ownership.OURS:
                self._renewed_s, self.is_contested = None, True
                return False
        return True

    def release(self) -> None:
        """Give the claim up, so that the next run need not wait."""
        if self._conditions is not None and not self.is_ours:
            self._remove_probe()
        if self.is_ours and self._is_still_there():
            self._renewed_s = None
            self._remote.delete([CLAIM])

    # ---- requests

    def _encoded(self) -> bytes:
        self._ours = replace(self._ours, renewed_unix_s=self._wall())
        return self._ours.encode()

    def _write_over(self, e_tag: str | None) -> None:
        if self._known_conditions.replace and e_tag is not None:
            self._written(self._remote.replace(CLAIM, self._encoded(), e_tag=e_tag))
        else:
            self._written(self._remote.put(CLAIM, self._encoded()))

    def _written(self, e_tag: str | None) -> None:
        self._e_tag, self._renewed_s = e_tag, self._clock()

    def _read(self) -> tuple[bytes, Claim | None, str | None] | None:
        data, e_tag = b"", None
        try:
            data, e_tag = self._remote.get(CLAIM, max_bytes=1 << 16)
            return data, Claim.decode(data, url=self._remote.url), e_tag
        except FileNotFoundError:
            return None
        except CorruptCheckpointError as error:
            logger.warning("the claim of the mirror cannot be read: %s", error)
            return data, None, e_tag

    def _is_still_there(self) -> bool:
        there = self._read()
        return there is not None and there[1] == self._ours

    # ---- what the service can do

    @property
    def _known_conditions(self) -> Conditions:
        assert self._conditions is not None, "take() probes first"
        return self._conditions

    @property
    def _probe_key(self) -> str:
        return f"probe-{self._ours.session}"

    def _probe(self) -> None:
        """Find out whether parts can be read, and by writes that must be refused which conditions
        are honoured."""
        if self._conditions is None:
            key = self._probe_key
            first = self._remote.put(key, b"first")
            self._require_parts(key)
            creates = self._refuses(lambda: self._remote.create(key, b"2"))
            replaces = first is not None and self._replaces(first)
            self._conditions = Conditions(creates, replaces)

    def _require_parts(self, key: str) -> None:
        part = bytearray(2)
        try:
            self._remote.read_into(key, memoryview(part), start=1)
            said = f"expected b'ir', got {bytes(part)!r}"
        except StorageError as error:
            if error.errno != errno.EIO:
                raise
            said = str(error.strerror)
        if part != b"ir":
            self._remove_probe()
            text = f"what is sent there cannot be read back in parts, as a restore does: {said}"
            raise StorageError(errno.EIO, text, f"{self._remote.url}/{key}")

    def _replaces(self, first: str) -> bool:
        key = self._probe_key
        if self._refuses(lambda: self._remote.replace(key, b"three", e_tag=first)):
            return False  # the tag was right, or `create` was not honoured either
        return self._refuses(lambda: self._remote.replace(key, b"four", e_tag=first))

    def _refuses(self, write: Callable[[], object]) -> bool:
        try:
            write()
        except (FileExistsError, NotImplementedError):
            return True
        return False

    def _remove_probe(self) -> None:
        with contextlib.suppress(OSError):
            self._remote.delete([self._probe_key])
