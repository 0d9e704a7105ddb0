"""An object store: whether a mirror there could list, write, read and remove, and how fast.

Objects are written under ``doctor-.../`` below the given place, which readers of a mirror do not
look at, and removed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from checkfreq.doctor.findings import Finding, Status
from checkfreq.errors import CheckFreqError
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.settings import Mirror
from checkfreq.types import size_text

_NUM_BYTES = 16 << 20
_CREDENTIALS = (
    "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL, or the role "
    "of this machine; the role must allow to list, get, put and delete under the prefix."
)
_PARTS = "Let the role get objects there, and take a server that returns parts of them (Range)."


def object_store(url: str, *, num_bytes: int = _NUM_BYTES) -> Iterator[Finding]:
    """Try the mirror at ``url``."""
    mirror = Mirror(url)
    means = "A mirror keeps copies of committed checkpoints there."
    try:
        objects = RemoteObjects(mirror)
    except (CheckFreqError, OSError) as error:
        yield Finding("client", Status.PROBLEM, str(error), means, "See the message.")
        return
    kind = urlsplit(url).scheme
    prefix = f"doctor-{os.getpid()}-{time.time_ns()}"
    keys = [f"{prefix}/{name}" for name in ("small", "once", "large")]
    try:
        yield _timed("list", lambda: objects.list(f"{prefix}/"), "Readers list the prefix.")
        wrote = _timed("write", lambda: objects.put(keys[0], b"x"), means)
        yield wrote
        if wrote.status is not Status.GOOD:
            return
        yield _conditions(objects, keys[1], kind)
        data = os.urandom(num_bytes)
        size = size_text(num_bytes)
        yield _timed(
            "upload", lambda: objects.put(keys[2], data),
            "Uploads go on beside training and take this long at least.", num_bytes,
        )  # fmt: skip
        view = memoryview(bytearray(num_bytes))
        got = _timed(
            "download", lambda: objects.read_into(keys[2], view, start=0),
            f"One request of {size}; a restore sends several at a time.", num_bytes, _PARTS,
        )  # fmt: skip
        yield got
        if got.status is Status.GOOD and view != data:
            yield Finding(
                "same_bytes", Status.PROBLEM, "what was read is not what was written", means,
                "The server, or a proxy before it, changes objects: take another.",
            )  # fmt: skip
        yield _timed("remove", lambda: objects.delete(keys), "Pruning removes old checkpoints.")
    finally:
        with contextlib.suppress(Exception):
            objects.delete(keys)


def _conditions(objects: RemoteObjects, key: str, kind: str) -> Finding:
    means = "One run at a time writes to a mirror: its claim is an object that is created once."
    try:
        objects.create(key, b"first")
        objects.create(key, b"second")
    except FileExistsError:
        return Finding("conditional_write", Status.GOOD, "works", means)
    except (CheckFreqError, OSError, NotImplementedError) as error:
        mend = "Take a server with conditional writes (If-None-Match)."
        return Finding("conditional_write", Status.PROBLEM, str(error), means, mend)
    mend = "Take a server with conditional writes (If-None-Match), or see that only one run writes."
    return Finding("conditional_write", Status.PROBLEM, f"ignored by this {kind}", means, mend)


def _timed(
    name: str, call: object, means: str, num_bytes: int | None = None, mend: str = _CREDENTIALS
) -> Finding:
    assert callable(call)
    start_s = time.perf_counter()
    try:
        call()
    except (CheckFreqError, OSError) as error:
        return Finding(name, Status.PROBLEM, str(error), means, mend)
    seconds = time.perf_counter() - start_s
    found = f"{1e3 * seconds:.0f} ms"
    figures: dict[str, float] = {"seconds": seconds}
    if num_bytes is not None:
        figures["bytes_per_s"] = num_bytes / max(seconds, 1e-9)
        found = f"{figures['bytes_per_s'] / 1e6:.0f} MB/s ({size_text(num_bytes)} in {found})"
    return Finding(name, Status.GOOD, found, means, "", figures)
