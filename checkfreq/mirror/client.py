"""A thin layer over obstore: the requests that a mirror needs, and errors that can be shown.

Every call ends within the client's timeouts and its few retries, which come at growing pauses
(`settings.open_store`). What fails is raised as StorageError, or FileNotFoundError for an object
that is not there; texts hold no credentials. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from checkfreq.errors import CorruptCheckpointError, StorageError, printable
from checkfreq.mirror.layout import SMALL_MAX_BYTES
from checkfreq.mirror.settings import Mirror, open_store
from checkfreq.store.fileops import LocalFileOps

if TYPE_CHECKING:
    from obstore.store import ObjectStore

#: Parts of one object that are sent at a time.
_PARTS_AT_A_TIME = 4
#: S3 takes no more parts of one object.
_MOST_PARTS = 10_000
_LONGEST_TEXT = 400
#: A list that is refused has no error of its own.
_REFUSED = re.compile(r"status code: 40[13]\b")
#: What to do, by the code in a service's answer; the first that is found counts.
_MEANINGS = (
    ("<Code>NoSuchBucket", errno.ENOENT, "there is no such bucket: create it, or correct the URL"),
    ("<Code>ContainerNotFound", errno.ENOENT, "there is no such container: create it"),
    ("<Code>RequestTimeTooSkewed", errno.EACCES, "this machine's clock is wrong: set it"),
    ("non-partial response", errno.EIO, "the server returns no parts of objects: take another"),
    ("<Code>ExpiredToken", errno.EACCES, "the credentials have expired: renew them"),
    ("", errno.EACCES, "access is denied: check the credentials, and what they may do"),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as the service describes it. ``e_tag``: changes with the content."""

    num_bytes: int
    e_tag: str | None
    modified: datetime


class RemoteObjects:
    """The objects under a mirror's prefix."""

    def __init__(self, mirror: Mirror, *, store: ObjectStore | None = None) -> None:
        self._mirror = mirror
        # First: it says what to install where obstore is missing.
        self._store = open_store(mirror) if store is None else store
        import obstore
        from obstore import exceptions

        self._client = obstore
        self._errors = exceptions
        parts = urlsplit(mirror.url)
        self._folder = Path(unquote(parts.path)) if parts.scheme == "file" else None

    @property
    def url(self) -> str:
        """Where the objects are."""
        return self._mirror.url

    # ---- writing

    def put(self, key: str, data: bytes | memoryview) -> str | None:
        """Write a whole object, atomically; returns its tag, where the service has such."""
        with self._showing("write", key):
            done = self._client.put(
                self._store,
                key,
                data,
                chunk_size=self._mirror.part_bytes,
                max_concurrency=self._concurrency,
            )
            return done["e_tag"]

    def put_stream(self, key: str, buffers: Iterator[memoryview], *, num_bytes: int) -> str | None:
        """Write an object of ``num_bytes`` in parts, from buffers that are used once each."""
        part_bytes = max(self._mirror.part_bytes, -(-num_bytes // (_MOST_PARTS - 1)))
        with self._showing("write", key):
            return self._client.put(
                self._store,
                key,
                buffers,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=self._concurrency,
            )["e_tag"]

    def create(self, key: str, data: bytes) -> str | None:
        """Write an object that must not be there; FileExistsError if it is."""
        with self._showing("create", key):
            try:
                done = self._client.put(self._store, key, data, mode="create")
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                raise FileExistsError(errno.EEXIST, "is there already", key) from None
            return done["e_tag"]

    def replace(self, key: str, data: bytes, *, e_tag: str) -> str | None:
        """Write an object over the one with this tag.

        FileExistsError if a different one is there, NotImplementedError where the service, or the
        client for it, cannot tell.
        """
        with self._showing("replace", key):
            try:
                done = self._client.put(self._store, key, data, mode={"e_tag": e_tag})
            except self._errors.PreconditionError:
                raise FileExistsError(errno.EEXIST, "was changed meanwhile", key) from None
            return done["e_tag"]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there count as removed."""
        for start in range(0, len(keys), 1000):
            self._delete(keys[start : start + 1000])

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            with self._showing("remove", keys[0]):
                self._client.delete(self._store, list(keys))
        except FileNotFoundError:  # some services stop there: go on one by one
            for key in keys if len(keys) > 1 else ():
                self._delete([key])

    # ---- reading

    def get(self, key: str, *, max_bytes: int = SMALL_MAX_BYTES) -> tuple[bytes, str | None]:
        """A small object and its tag; CorruptCheckpointError if it is larger than ``max_bytes``."""
        with self._showing("read", key):
            self._require_regular(key)
            found = self._client.get(self._store, key)
            if (got := found.meta["size"]) <= max_bytes:
                return bytes(found.bytes()), found.meta["e_tag"]
        raise CorruptCheckpointError(
            f"{self.url}/{key}", check="size", expected=f"at most {max_bytes} bytes", got=got
        )

    def read_into(self, key: str, view: memoryview, *, start: int) -> None:
        """Fill ``view`` with an object's bytes from ``start``."""
        with self._showing("read", key):
            self._require_regular(key)
            data = self._client.get_range(self._store, key, start=start, length=len(view))
            if len(data) != len(view):
                raise OSError(errno.EIO, f"expected {len(view)} bytes, got {len(data)}")
            view[:] = memoryview(data)

    def head(self, key: str) -> Seen | None:
        """What the service says of an object; None if it is not there."""
        try:
            with self._showing("look at", key):
                self._require_regular(key)
                meta = self._client.head(self._store, key)
        except FileNotFoundError:
            return None
        return Seen(meta["size"], meta["e_tag"], meta["last_modified"])

    def list(self, prefix: str) -> dict[str, Seen]:
        """Every object under ``prefix``, which ends in a slash."""
        with self._showing("list", prefix):
            return {
                meta["path"]: Seen(meta["size"], meta["e_tag"], meta["last_modified"])
                for batch in self._client.list(self._store, prefix=prefix)
                for meta in batch
            }

    # ---- inside

    @property
    def _concurrency(self) -> int:
        # A limit on the rate is kept by pauses between parts: one at a time.
        return 1 if self._mirror.max_bytes_per_s else _PARTS_AT_A_TIME

    def _require_regular(self, key: str) -> None:
        """In a folder: ForeignEntryError for a FIFO, for which the client would wait for ever."""
        if self._folder is not None:
            LocalFileOps(self._folder).file_size(self._folder / key)

    @contextlib.contextmanager
    def _showing(self, what: str, key: str) -> Iterator[None]:
        """Raise the client's errors as ours: short, with the place, and without credentials."""
        place = f"{self.url}/{key}"
        try:
            yield
        except StorageError:
            raise
        except FileExistsError as error:
            raise FileExistsError(error.errno, error.strerror, place) from None
        except NotImplementedError:
            raise
        except (self._errors.BaseError, OSError, RuntimeError, ValueError) as error:
            meaning = self._meaning(error)
            if isinstance(error, FileNotFoundError) and meaning is None:
                raise FileNotFoundError(errno.ENOENT, "no such object", place) from None
            number, hint = meaning or (errno.EIO, "")
            said = f"{hint} ({self._text(error)})" if hint else self._text(error)
            raise StorageError(number, f"cannot {what}: {said}", place) from None

    def _meaning(self, error: BaseException) -> tuple[int, str] | None:
        """The errno and the hint for what no repetition changes; None for anything else."""
        text = str(error)
        refusals = (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError)
        is_refusal = isinstance(error, refusals) or _REFUSED.search(text) is not None
        for code, number, hint in _MEANINGS:
            if code in text and (is_refusal or number != errno.EACCES):
                return number, hint
        return None

    def _text(self, error: BaseException) -> str:
        """The error in one line: what follows an empty line is for the client's developers."""
        first = str(error).split("\n\n", 1)[0]
        text = " ".join(self._mirror.scrub(first).split())
        return printable(text[:_LONGEST_TEXT]) or type(error).__name__
