"""Fetches one item ahead, to find the end of a loader whose length is unknown.

Training process only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Ahead = TypeVar("Ahead")


class LookAhead(Generic[Ahead]):
    """The items that ``fetch`` returns until it raises ``StopIteration``, at most one ahead."""

    def __init__(self, fetch: Callable[[], Ahead]) -> None:
        self._fetch: Callable[[], Ahead] | None = fetch
        self._ahead: tuple[Ahead] | None = None
        self._failure: Exception | None = None

    def is_over(self) -> bool:
        """Whether no item is left. Fetches the next item, which the next call returns.

        If the fetch fails, the error is raised by that call and not here: the batch before it was
        served, and the boundary behind it must still be passed.
        """
        if self._ahead is None and self._failure is None and self._fetch is not None:
            try:
                self._ahead = (self._fetch(),)
            except StopIteration:
                self.close()
            except Exception as error:
                self._failure = error
        return self._ahead is None and self._failure is None

    def __next__(self) -> Ahead:
        if self.is_over():
            raise StopIteration
        if self._failure is not None:
            raise self._failure
        assert self._ahead is not None
        (item,), self._ahead = self._ahead, None
        return item

    def close(self) -> None:
        """Drop the item that was fetched, and ``fetch`` with everything it refers to."""
        self._fetch = self._ahead = self._failure = None
