"""Removing checkpoints from a mirror: the marker first, then what no other marker names.

A crash in between leaves objects that nothing names; they are removed once they are a day old by
the service's clock. Younger ones may be pieces of an upload that was interrupted, which the next
try uses. Nothing but markers is removed while a marker cannot be read: it may name anything.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from datetime import timedelta

from checkfreq import faults
from checkfreq.errors import CheckFreqError, NoCheckpointError
from checkfreq.mirror.client import RemoteObjects, Seen
from checkfreq.mirror.layout import (
    CHECKPOINTS,
    MANIFESTS,
    OBJECTS,
    SUPERSEDED,
    Marker,
    is_superseded_key,
    marker_key,
    step_of_marker,
    superseded_key,
)

logger = logging.getLogger(__name__)

#: Objects that no marker names are left alone for so long.
_YOUNG = timedelta(days=1)


class RemoteMarkers:
    """The markers of one mirror, each read once. Belongs to the mirror's thread."""

    def __init__(self, remote: RemoteObjects) -> None:
        self._remote = remote
        self._known: dict[str, tuple[Seen, Marker | None]] = {}

    def read(self) -> dict[int, Marker]:
        """The markers that can be read, by step, ascending."""
        found = [m for m in self._all(CHECKPOINTS).values() if m is not None]
        return {marker.step: marker for marker in sorted(found, key=lambda m: m.step)}

    def newest(self) -> int | None:
        """The highest step that has a marker which can be read."""
        return max(self.read(), default=None)

    def remove(self, steps: Collection[int]) -> list[int]:
        """Remove checkpoints, but never the newest; returns those that were removed."""
        there = self.read()
        doomed = sorted(step for step in set(steps) & there.keys() if step != max(there))
        for step in doomed:
            faults.reach("mirror.remove_marker")
            self._forget(marker_key(step))
        if doomed:
            faults.reach("mirror.remove_objects")
            self._remove_unnamed(set().union(*(there[step].keys() for step in doomed)))
        return doomed

    def set_aside(self, steps: Iterable[int]) -> None:
        """Move markers to ``superseded/``: the run went back, and these are of its other future."""
        there = self.read()
        for step in steps:
            marker = there.get(step)
            if marker is not None:
                self._remote.put(superseded_key(step, marker.attempt), marker.encode())
                self._forget(marker_key(step))

    def sweep(self) -> int:
        """Remove what no marker names and is a day old; returns how many objects that were."""
        found = {**self._remote.list(OBJECTS), **self._remote.list(MANIFESTS)}
        if not found:
            return 0
        now = max(seen.modified for seen in (*found.values(), *self._seen_markers()))
        old = {key for key, seen in found.items() if now - seen.modified > _YOUNG}
        return self._remove_unnamed(old)

    # ---- inside

    def _all(self, prefix: str) -> dict[str, Marker | None]:
        """All markers under a prefix; None for one that cannot be read."""
        listed = self._remote.list(prefix)
        for key in [key for key in self._known if key.startswith(prefix) and key not in listed]:
            del self._known[key]
        for key, seen in listed.items():
            if step_of_marker(key) is None and not is_superseded_key(key):
                continue
            if key not in self._known or self._known[key][0] != seen:
                self._known[key] = seen, self._decoded(key)
        return {key: item[1] for key, item in self._known.items() if key.startswith(prefix)}

    def _decoded(self, key: str) -> Marker | None:
        try:
            return Marker.decode(self._remote.get(key)[0], key=key, url=self._remote.url)
        except (FileNotFoundError, NoCheckpointError):
            return None
        except CheckFreqError as error:
            if isinstance(error, OSError):
                raise
            logger.warning("a marker of the mirror cannot be read: %s", error)
            return None

    def _seen_markers(self) -> list[Seen]:
        self.read()
        return [seen for seen, _ in self._known.values()]

    def _forget(self, key: str) -> None:
        self._remote.delete([key])
        self._known.pop(key, None)

    def _remove_unnamed(self, keys: Collection[str]) -> int:
        markers = [*self._all(CHECKPOINTS).values(), *self._all(SUPERSEDED).values()]
        if not keys or None in markers:
            return 0
        named: set[str] = set().union(*(marker.keys() for marker in markers if marker))
        doomed = sorted(set(keys) - named)
        self._remote.delete(doomed)
        return len(doomed)
