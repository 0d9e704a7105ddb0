"""What the book knows of attempts in flight and after their end."""

from __future__ import annotations

from typing import Any

from checkfreq.persist import protocol as p
from checkfreq.persist.attempts import Attempt, AttemptBook, Marks

SLOT: Any = "slot 0"


def test_later_ones_of_the_run_before_are_not_written_for_a_run_that_goes_on_before_them() -> None:
    book = AttemptBook(tolerate_failures=0, release=lambda slot: None)
    for step in (5, 6, 7, 8):
        request = p.Persist(f"a{step}", step, 0, {}, 1, {}, {})
        book.add(inherited := Attempt.inherited(request, SLOT))
        if step < 7:  # before the run was told where it goes on
            book.commit(committed(inherited))
    book.disown_later_than(5)
    book.continue_from(5, "a5")
    assert not any(map(book.is_written, (6, 7, 8)))

    for attempt in book.active:
        book.commit(committed(attempt))

    assert not any(map(book.is_written, (6, 7, 8)))
    assert book.last_durable_step == 5
    assert {step for step, _ in book.durable} == {5}


def committed(attempt: Attempt) -> p.Committed:
    return p.Committed(attempt.id, attempt.step, 1, 0.1, 0.1, 1.0, True, False)


def begun(book: AttemptBook, step: int) -> Attempt:
    attempt = Attempt(step, SLOT, "periodic", Marks(), started_s=1.0)
    book.add(attempt)
    return attempt


def ended(book: AttemptBook, step: int) -> None:
    attempt = begun(book, step)
    assert attempt.copied(None)
    book.commit(committed(attempt))


def test_a_step_that_is_taken_again_is_not_durable_until_it_is_replaced() -> None:
    book = AttemptBook(tolerate_failures=0, release=lambda slot: None, replaces=True)
    for step in (4, 6):
        ended(book, step)
    begun(book, 6)
    assert (book.last_durable_step, book.last_written_step) == (4, None)
    ended(book, 6)
    assert (book.last_durable_step, book.last_written_step) == (6, 6)
    begun(book, 6)
    assert book.last_durable_step == 4
