"""One zygote for a file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stops.zygote import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    try:
        yield process
    finally:
        process.close()
