"""The gate inside of compiled functions: it is called each time, and never compiled away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq.forks import Home
from checkfreq.snapshot.device_copier import DeviceCopier, Limits
from checkfreq.snapshot.gate import UpdateGate
from tests.snapshot.conftest import steps_of

#: torch warns of itself: of what its compiler imports, and that it breaks a graph at our call.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

#: Whether the copy was still running at each of the updates.
PENDING = (False, False, True, True, False, True)


class Event(torch.Event):
    """An event of a copy. The compiler asks it once and takes the answer for a constant."""

    is_pending = False

    def query(self) -> bool:
        return not Event.is_pending


class Streams:
    """As much of a device as a fence needs; notes each wait."""

    def __init__(self) -> None:
        self.waits: list[Event] = []

    def side_stream(self, device: torch.device) -> str:
        return "side"

    def current_stream(self, device: torch.device) -> str:
        return "compute"

    def record(self, stream: str) -> Event:
        return Event("cpu")

    def wait(self, stream: str, event: Event) -> None:
        self.waits.append(event)

    def is_done(self, event: Event) -> bool:
        return bool(event.query())

    def elapsed_s(self, start: Event, end: Event) -> float:
        return 0.0


class Fence:
    """The fence of a copier whose copy is running whenever ``Event.is_pending`` says so."""

    def __init__(self) -> None:
        self._streams = Streams()
        device: Any = self._streams
        self._copier = DeviceCopier(device, torch.device("cuda", 0), limits=Limits())

    def expect(self, *, pending: bool) -> None:
        Event.is_pending = pending
        self._copier._read = Event("cpu")
        self._streams.waits.clear()

    @property
    def has_waited(self) -> bool:
        return bool(self._streams.waits)

    def __call__(self) -> None:
        self._copier.fence()


class AtHome(Home):
    """Never elsewhere. The real one asks the system, at which torch's compiler happens to give up
    today: the gate must not depend on that."""

    def is_elsewhere(self) -> bool:
        return False


class Run:
    """A model, its optimizer and the gate in front of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.fence = Fence()
        self.gate = UpdateGate(steps_of(self.optimizer), fence=self.fence, home=AtHome("a test"))

    def backward(self) -> None:
        self.model(torch.ones(4, 3)).square().mean().backward()

    def iterate(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def iterate_by_hand(self) -> None:
        self.backward()
        with self.gate.updating(), torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
                parameter.grad = None


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("iterate", [Run.iterate, Run.iterate_by_hand], ids=["step", "by hand"])
def test_every_compiled_update_asks_the_fence_and_takes_the_answer_of_that_time(
    iterate: Callable[[Run], None],
) -> None:
    run = Run()
    compiled = torch.compile(iterate, backend="eager")
    for number, pending in enumerate(PENDING, start=1):
        run.fence.expect(pending=pending)
        compiled(run)
        assert run.fence.has_waited == pending, f"update {number}"
        assert run.gate.attempts == number


def write_by_hand(run: Run) -> None:
    with run.gate.updating():
        run.model.bias.data.zero_()


@pytest.mark.parametrize("update", [lambda run: run.optimizer.step(), write_by_hand])
def test_with_fullgraph_the_compiler_refuses_and_says_why(update: Callable[[Run], None]) -> None:
    run = Run()
    run.backward()
    refused = r"(?s)torch\.compiler\.disable.*checkfreq orders weight updates.*without fullgraph"
    with pytest.raises(RuntimeError, match=refused):
        torch.compile(update, backend="eager", fullgraph=True)(run)
    assert run.gate.attempts == 0
