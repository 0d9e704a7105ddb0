"""One item fetched before it is asked for: how a loader that cannot say its length sees its end.

Training process only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Ahead = TypeVar("Ahead")


class LookAhead(Generic[Ahead]):
    """What ``fetch`` returns, until it raises ``StopIteration``, at most one item early."""

    def __init__(self, fetch: Callable[[], Ahead]) -> None:
        self._fetch: Callable[[], Ahead] | None = fetch
        self._ahead: tuple[Ahead] | None = None
        self._failure: Exception | None = None

    def is_over(self) -> bool:
        """Whether no item is left; fetches the next one, which is then returned.

        An error in it is raised when it is asked for: what is behind is not lost by looking.
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
        """Drop what was fetched, and ``fetch`` with all that it holds."""
        self._fetch = self._ahead = self._failure = None
