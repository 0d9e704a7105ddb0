"""Large frameworks are imported by the fork server once, and only where they are tested."""

from __future__ import annotations

import pytest

from tests.fork_server import preload

#: What the tests of a file start.
_STARTED = {
    "test_trainer.py": ("tests.integrations.vision", "tests.integrations.trainers"),
    "test_accelerate.py": ("tests.integrations.accelerated",),
    "test_lightning_kills.py": ("tests.integrations.lightning.program",),
}


def pytest_collection_finish(session: pytest.Session) -> None:
    """The server starts with the first test that needs it."""
    files = {item.path.name for item in session.items}
    for file, modules in _STARTED.items():
        if file in files:
            preload(*modules)
