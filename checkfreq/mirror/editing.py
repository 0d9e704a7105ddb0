"""Changes by hand to what lies in a mirror: pins, removals, a step that is set aside.

Whoever makes them holds the claim meanwhile, as a run does: no run writes there at the same time.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import replace

from checkfreq.errors import ConfigError
from checkfreq.mirror.claim import ClaimKeeper, Ownership
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import MARKS, decode_marks, encode_marks, superseded_key
from checkfreq.mirror.removal import RemoteMarkers
from checkfreq.mirror.settings import Mirror
from checkfreq.store.marks import StepMark


class MirrorEditor:
    """A mirror that is being changed, between `open` and `close`."""

    def __init__(self, mirror: Mirror) -> None:
        self._remote = RemoteObjects(mirror)
        self._claim = ClaimKeeper(self._remote, run=f"by-hand-{uuid.uuid4().hex}")
        self._markers = RemoteMarkers(self._remote)

    def open(self, *, otherwise: str) -> None:
        """Take the claim. ConfigError beside a run, which ends with ``otherwise``: what to do."""
        if self._claim.take() is not Ownership.OURS:
            holder, url = self._claim.holder, self._remote.url
            self._claim.release()
            raise ConfigError(
                f"{url} is in use by {holder}, or was within the last minute: expected no run "
                f"there. {otherwise}"
            )

    def close(self) -> None:
        """Give the claim up."""
        self._claim.release()

    def marks(self) -> dict[int, StepMark]:
        """The marks of each step; CorruptCheckpointError if they cannot be read."""
        try:
            return decode_marks(self._remote.get(MARKS)[0], url=self._remote.url)
        except FileNotFoundError:
            return {}

    def add_mark(self, step: int, *, keep: bool) -> None:
        """Pin a step, or do so no more."""
        marks = self.marks()
        marks[step] = replace(marks.get(step, StepMark()), keep=keep)
        self._remote.put(MARKS, encode_marks(marks))

    def prune(self, steps: Collection[int]) -> list[int]:
        """Remove steps, but never the newest; returns those that were removed."""
        return self._markers.remove(steps)

    def quarantine(self, step: int, reason: str) -> str:
        """Move the marker of a step to ``superseded/``, with the reason; returns where it is."""
        key = superseded_key(step, self._markers.read()[step].attempt)
        self._remote.put(f"{key.removesuffix('.json')}.txt", f"{reason}\n".encode())
        self._markers.set_aside([step])
        return f"{self._remote.url}/{key}"
