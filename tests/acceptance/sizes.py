"""The two sizes of the acceptance tests: the smoke, in ``make test``, and the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest


def sized(cases: Iterable[object], *, smoke: Callable[[object], bool]) -> list[object]:
    """Arguments for ``parametrize``: where ``smoke()`` is False, in the whole alone."""
    return [one if smoke(one) else pytest.param(*_of(one), marks=pytest.mark.more) for one in cases]


def _of(case: object) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)
