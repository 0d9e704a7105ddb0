"""Servers that some tests need: where one cannot run they skip, where it must run they fail."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def require(name: str, reason: str) -> NoReturn:
    """Skip for ``reason``; fail if the environment's CHECKFREQ_REQUIRE, a list, has ``name``."""
    if name in os.environ.get("CHECKFREQ_REQUIRE", "").split(","):
        pytest.fail(f"CHECKFREQ_REQUIRE names {name!r}: {reason}")
    pytest.skip(reason)
