"""``chk_dir/profile.json``: measured costs and the history of runs, kept for the next run.

A profile is used again only if every entry of its key is the same. The history of the runs in
this directory, from which the time between failures is estimated, does not depend on the key.
Losing the file is harmless: it is replaced atomically but never synced, and a file that cannot be
read is replaced by a new one. Only the trainer (rank 0) reads and writes it, while its run owns
the directory; it is read once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkfreq.errors import ConfigError
from checkfreq.policy.failure_rate import LEAST_RUN_S, FailureRate
from checkfreq.policy.profile import Profile, is_amount
from checkfreq.store.fileops import LocalFileOps
from checkfreq.types import Json

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 1
#: Deeper JSON was not written by us, and json.dumps could fail on it.
_MAX_DEPTH = 20
#: Far above the few kilobytes that we write: a larger file is not read into memory.
_MAX_BYTES = 1 << 20


class _UnusableError(Exception):
    """The reason why the file, or a part of it, cannot be used."""


@dataclass(slots=True)
class _History:
    running_s: float = 0.0
    failures: int = 0
    open: bool = False
    lasted: bool = False

    def rate(self, *, is_over: bool, run_s: float = 0.0) -> FailureRate:
        """Of all runs. ``is_over``: no run is open, so that one which did not end has failed."""
        pending = is_over and self.open and self.lasted
        return FailureRate(self.failures + pending, self.running_s + run_s)


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """What a file has, whatever it was measured under. ``key``: that, as JSON-able values.

    failures: of the runs that have ended.
    """

    profile: Profile | None
    key: Json
    failures: FailureRate


def stored_costs(path: Path) -> StoredCosts:
    """Read a file for somebody who only looks. Raises FileNotFoundError, OSError, and ValueError
    with a reason."""
    ops = LocalFileOps(path.parent)
    data = ops.read_bytes(path, max_bytes=_MAX_BYTES)
    try:
        document = _parsed(data)
        past, stored = _history_in(document), _stored_in(document) or {}
        key = stored.get("key")
        profile = _profile_under(key, stored) if stored else None
    except _UnusableError as why:
        raise ValueError(str(why)) from None
    return StoredCosts(profile, key, past.rate(is_over=False))  # the latest may go on


class ProfileCache:
    """The file at ``path``; its directory must exist once something is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ops = LocalFileOps(path.parent)
        self._is_read = False
        self._stored: Json | None = None  # {"key": ..., "profile": ...} as read
        self._past = _History()
        self._run_s = 0.0
        self._is_open = False
        self._has_warned = False

    # ---- the profile

    def load(self, key: Mapping[str, Any]) -> Profile | None:
        """The profile measured under exactly this key, or None and one INFO line that says why."""
        self._read()
        if self._stored is None:
            return None
        try:
            return _profile_under(_as_json(key), self._stored)
        except _UnusableError as why:
            logger.info("the profile in %s is not used: %s", self._path, why)
            return None

    def store(self, key: Mapping[str, Any], profile: Profile) -> None:
        """Replace the stored profile. A failed write is logged once, as a warning."""
        self._read()
        self._stored = {"key": _as_json(key), "profile": profile.to_dict()}
        self._write()

    def discard(self, reason: str) -> None:
        """Forget the profile, not the history."""
        self._read()
        if self._stored is not None:
            logger.info("the profile in %s is discarded: %s", self._path, reason)
            self._stored = None
            self._write()

    # ---- the history

    def opened(self) -> None:
        """A run starts. If the previous one did not end cleanly, that counts as a failure."""
        self._read()
        self._past.failures = self.failures().failures
        self._past.open, self._past.lasted, self._is_open = True, False, True
        self._write()

    def note_running(self, seconds: float) -> None:
        """This run has lasted ``seconds`` in total so far. Writes the file: call it rarely.

        Runs of less than a minute are ignored.
        """
        self._read()
        if is_amount(seconds) and seconds >= LEAST_RUN_S:
            self._past.lasted = True
            self._run_s = max(self._run_s, seconds)
        self._write()

    def closed(self) -> None:
        """This run ends cleanly, or somebody asked for its end."""
        self._read()
        self._past.open = False
        self._write()

    def failures(self) -> FailureRate:
        """How often runs in this directory have failed so far, this one's time included."""
        self._read()
        return self._past.rate(is_over=not self._is_open, run_s=self._run_s)

    # ---- the file

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        try:
            document = _parsed(self._ops.read_bytes(self._path, max_bytes=_MAX_BYTES))
            self._past, self._stored = _history_in(document), _stored_in(document)
        except FileNotFoundError:
            pass
        except (OSError, _UnusableError) as why:
            logger.info("%s cannot be used and is started anew: %s", self._path, why)

    def _write(self) -> None:
        history = asdict(self._past) | {"running_s": self._past.running_s + self._run_s}
        document = {"format_version": _FORMAT_VERSION, "history": history, **(self._stored or {})}
        try:
            text = json.dumps(document, indent=1) + "\n"
            self._ops.replace_file(self._path, text.encode(), sync=False)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s is not being kept up to date: %s", self._path, error)


def _as_json(key: Mapping[str, Any]) -> Any:
    """The key as it looks after a round trip through the file."""
    return json.loads(json.dumps(dict(key), default=str))


def _parsed(data: bytes) -> Json:
    try:
        document = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"not valid JSON ({error})") from None
    if not isinstance(document, dict):
        raise _UnusableError(f"expected a JSON object, found {type(document).__name__}")
    version = document.get("format_version")
    if version is True or version != _FORMAT_VERSION:
        # The value found is not shown: the file may not be ours, and hold anything.
        raise _UnusableError(f"expected format_version {_FORMAT_VERSION}")
    if _is_too_deep(document):
        raise _UnusableError(f"nested more than {_MAX_DEPTH} deep")
    return document


def _is_too_deep(document: Json) -> bool:
    level = [document]
    for _ in range(_MAX_DEPTH):
        inner = [node.values() if isinstance(node, dict) else node for node in level]
        level = [child for nodes in inner for child in nodes if isinstance(child, dict | list)]
    return bool(level)


def _stored_in(document: Json) -> Json | None:
    """The profile and its key, unchecked; None if there are none."""
    found = {name: document[name] for name in ("key", "profile") if name in document}
    return found or None


def _history_in(document: Json) -> _History:
    match document.get("history"):
        case {
            "running_s": running_s,
            "failures": int(failures),
            "open": bool(is_open),
            "lasted": bool(lasted),
        }:
            if is_amount(running_s) and is_amount(failures):
                return _History(float(running_s), failures, is_open, lasted)
    raise _UnusableError("its history lacks a field or has a value that is not a number")


def _profile_under(key: Json, stored: Json) -> Profile:
    found, data = stored.get("key"), stored.get("profile")
    if not isinstance(found, dict) or not isinstance(data, dict):
        raise _UnusableError("it lacks its key or its profile")
    differences = _differences(key, found)
    if differences:
        raise _UnusableError(f"it was measured under other conditions: {differences}")
    try:
        return Profile.from_dict(data)
    except ConfigError as error:
        raise _UnusableError(str(error)) from None


def _differences(expected: Json, found: Json) -> str:
    """The entries that differ, as text. They are compared as JSON, in which 1 is not True."""
    entries = sorted(expected.keys() | found.keys())
    texts = [(name, _entry(expected, name), _entry(found, name)) for name in entries]
    return "; ".join(f"{name}: expected {a}, found {b}" for name, a, b in texts if a != b)


def _entry(key: Json, name: str) -> str:
    return json.dumps(key[name], sort_keys=True) if name in key else "nothing"
