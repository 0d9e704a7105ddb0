"""What loops draw from is searched for among all objects that are not frozen."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _earlier_objects_are_not_searched() -> Iterator[None]:
    """They are a million where a whole suite runs."""
    gc.freeze()
    yield
    gc.unfreeze()
