"""The tests of the benchmark suite run in ``make test-more``: they measure, train and plot."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test of this folder."""
    item.add_marker(pytest.mark.more)
