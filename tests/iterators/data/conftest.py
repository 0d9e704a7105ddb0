"""Libraries of data are imported by the fork server once, and only where they are tested."""

from __future__ import annotations

import importlib.util

import pytest

from tests.fork_server import preload

#: What to import, by the first word of a kind of loader and the package that it needs. MosaicML's
#: imports torchvision and transformers.
_MODULES = {
    ("datasets", "datasets"): ["datasets"],
    ("webdataset", "webdataset"): ["webdataset"],
    ("torchdata", "torchdata"): ["torchdata.nodes"],
    ("mosaicml", "streaming"): ["tests.integrations.vision", "streaming"],
}


def pytest_collection_finish(session: pytest.Session) -> None:
    """The server starts with the first test that needs it."""
    names = [item.name for item in session.items if "iterators/data" in item.path.as_posix()]
    killed = [name for name in names if "killed" in name]
    for (kind, package), modules in _MODULES.items():
        if any(f"[{kind}" in name for name in killed) and importlib.util.find_spec(package):
            preload(*modules)
    if killed:
        preload("tests.iterators.data.program")
