"""What the book knows of an attempt once it ended."""

from __future__ import annotations

from typing import Any

from checkfreq.persist import protocol as p
from checkfreq.persist.attempts import Attempt, AttemptBook, Marks

SLOT: Any = "slot 0"


def persisting(book: AttemptBook) -> Attempt:
    """An attempt that was handed over."""
    attempt = Attempt(3, SLOT, "periodic", Marks(), started_s=1.0)
    book.add(attempt)
    assert attempt.copied(None)
    return attempt


def test_a_commit_tells_when_it_was_durable_and_what_it_took() -> None:
    released: list[Any] = []
    book = AttemptBook(tolerate_failures=0, release=released.append)
    attempt = persisting(book)
    assert (attempt.persist_s, attempt.num_bytes, attempt.durable_s) == (None, None, None)

    reply = p.Committed(
        attempt.id,
        step=3,
        num_bytes=4096,
        write_s=0.5,
        persist_s=0.75,
        ended_s=2.5,
        direct=True,
        kept_existing=False,
    )

    assert book.commit(reply) is attempt
    assert (attempt.persist_s, attempt.num_bytes, attempt.durable_s) == (0.75, 4096, 2.5)
    assert released == [SLOT]


def test_a_failed_attempt_was_never_durable() -> None:
    book = AttemptBook(tolerate_failures=1, release=lambda slot: None)
    attempt = persisting(book)

    book.fail(p.Failed(attempt.id, 3, "write", "no space", "traceback"))

    assert (attempt.persist_s, attempt.num_bytes, attempt.durable_s) == (None, None, None)
