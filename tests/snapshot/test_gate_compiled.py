"""The gate inside of compiled functions: it is called each time, and never compiled away."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from checkfreq.forks import Home
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


class Fence:
    """Notes whether it found the copy still running."""

    def __init__(self) -> None:
        self._event = Event("cpu")
        self.has_waited = False

    def __call__(self) -> None:
        self.has_waited = not self._event.query()


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
        Event.is_pending, run.fence.has_waited = pending, not pending
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
