"""What every tier shares: no test is timed, and those of a device skip where there is none."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from checkfreq import faults
from tests import leftovers

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell has its background jobs ignore SIGINT, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: Of tests that take long, together or each; a file of them is begun early.
LONG = ("crash", "dist", "slow")


@pytest.fixture(autouse=True, scope="session")
def _users_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The key that extra state is saved with is of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _torch_is_seeded() -> None:
    """Loaders without a seed take torch's, and tests before this one may have set it."""
    torch.manual_seed(20260)


@pytest.fixture(autouse=True)
def _signals_are_as_before() -> Iterator[None]:
    """A manager that was told to stop keeps its handlers: the process is about to end."""
    stops = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in stops}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def _no_worker_lingers() -> Iterator[None]:
    """A killed training process leaves one, with its memory, for minutes."""
    yield
    leftovers.end_lingering()


@pytest.fixture
def fault_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Install a script: at once in this process, and in each worker started from now on."""

    def install(script: str) -> None:
        monkeypatch.setenv("CHECKFREQ_FAULT", script)
        faults.reload()

    yield install
    monkeypatch.delenv("CHECKFREQ_FAULT", raising=False)
    faults.reload()


def pytest_configure() -> None:
    """One seed for the hostile directories of tests/hostile, in all processes of a run; and a mark
    on the processes that this one starts."""
    leftovers.mark()
    os.environ.setdefault("CHECKFREQ_FUZZ_SEED", str(random.SystemRandom().getrandbits(32)))


def pytest_report_header() -> str:
    """It is printed, so that a failure can be repeated."""
    return f"CHECKFREQ_FUZZ_SEED={os.environ['CHECKFREQ_FUZZ_SEED']}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files that take long; skip tests marked ``gpu`` without a CUDA device."""
    long = {item.path for item in items if any(map(item.get_closest_marker, LONG))}
    items.sort(key=lambda item: item.path not in long)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
