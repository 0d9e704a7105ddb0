"""An S3 server for the tests of a module, and a prefix for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3.proxy import FaultProxy, one_in_five
from tests.s3.server import S3Server, running

#: For tests of what servers may differ in.
ON_BOTH = pytest.mark.parametrize("s3", ["moto", "localbucket"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def s3(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Server]:
    """moto's, or the one of the test's parameter."""
    with running(tmp_path_factory.mktemp("s3"), getattr(request, "param", "moto")) as server:
        yield server


@pytest.fixture
def faulty(s3: S3Server) -> Iterator[FaultProxy]:
    """The same server, behind a proxy that spoils one request in five."""
    with FaultProxy(s3.port, one_in_five()).listening() as proxy:
        yield proxy


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Of the test alone."""
    return f"runs/{tmp_path.name}"
