"""Parameters that a tracked optimizer steps and no tracked object holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import Role
from tests.state.ranks import Manifest, part, restored
from tests.state.support import Shot, bits, restore, take


class Trained:
    """A layer that is tracked, and a scale that is not, after one step."""

    def __init__(self, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.scale = torch.full((2,), scale, dtype=dtype, requires_grad=True)
        self.opt = torch.optim.AdamW([*self.model.parameters(), self.scale], lr=0.1)

    @property
    def chk(self) -> CFCheckpoint:
        return CFCheckpoint(model=self.model, opt=self.opt)

    def step(self) -> Trained:
        (self.model(torch.ones(1, 3)) * self.scale.float()).sum().backward()
        self.opt.step()
        self.opt.zero_grad()
        return self


def unheld(shot: Shot, name: str = "opt") -> list[int]:
    """Numbers of the parameters that were saved with the optimizer."""
    found: list[int] = shot.found.manifest.objects[name].get("parameters", [])
    return found


@pytest.mark.parametrize("has_hook", [False, True])
def test_it_is_saved_with_its_optimizer_and_restored_in_place(has_hook: bool) -> None:
    """A ``load_state_dict`` that does more gets torch's own form."""
    trained, fresh = Trained().step(), Trained(scale=5.0)
    live, keys = fresh.scale, list[Any]()
    if has_hook:
        fresh.opt.register_load_state_dict_pre_hook(lambda _, state: keys.extend(state))
    shot = take(trained.chk)
    assert unheld(shot) == [2]
    restore(fresh.chk, shot)
    assert keys == (["state", "param_groups"] if has_hook else [])
    assert fresh.scale is live
    assert bits(fresh.scale) == bits(trained.scale)


class Holder:
    """An object with a state of its own, which has the tensors themselves or copies."""

    def __init__(self, tensor: Tensor, *, copies: bool) -> None:
        self._tensor, self._copies = tensor, copies

    def state_dict(self) -> dict[str, Tensor]:
        return {"it": self._tensor.detach().clone() if self._copies else self._tensor.detach()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._tensor.data.copy_(state["it"])


def _hooked(module: nn.Module) -> nn.Module:
    module.register_state_dict_post_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "hold",
    [
        lambda p: {"a": {"b": [p]}},
        lambda p: Holder(p, copies=False),
        lambda p: nn.ParameterList([p]),
        lambda p: _hooked(nn.ParameterList([p])),
        lambda p: nn.parallel.DataParallel(nn.ParameterList([p])),
    ],
    ids=["dict", "object", "module", "hooked", "wrapped"],
)
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_what_another_object_holds_is_left_to_it(
    hold: Any, optimizer_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = nn.Parameter(torch.ones(3))
    tracked = {"held": hold(parameter), "opt": torch.optim.SGD([parameter], lr=0.1)}
    if optimizer_first:
        tracked = dict(reversed(tracked.items()))
    assert unheld(take(CFCheckpoint(**tracked))) == []
    assert not caplog.records


def test_views_of_a_tracked_buffer_and_the_buffer_of_tracked_views_are_held() -> None:
    flat = torch.arange(6.0)
    first, second = flat[:4].view(2, 2).requires_grad_(), flat[4:].requires_grad_()
    views = torch.optim.SGD([first, second], lr=0.1)
    assert unheld(take(CFCheckpoint(flat={"flat": flat}, opt=views))) == []
    whole = torch.optim.SGD([flat.detach().requires_grad_()], lr=0.1)
    assert unheld(take(CFCheckpoint(views=[first, second], opt=whole))) == []
    assert unheld(take(CFCheckpoint(views=[second], opt=whole))) == [0]
    assert unheld(take(CFCheckpoint(views=[second], opt=views))) == [0]


def test_a_copy_in_another_objects_state_is_no_reason_to_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameter = torch.ones(3, requires_grad=True)
    held = Holder(parameter, copies=True)
    shot = take(CFCheckpoint(held=held, opt=torch.optim.SGD([parameter], lr=0.1)))
    assert unheld(shot) == [0]
    assert not caplog.records
    target = nn.ParameterList([parameter.detach().clone()])
    take(CFCheckpoint(target=target, opt=torch.optim.SGD([parameter], lr=0.1)))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("split", [False, True])
def test_ranks_write_it_once_and_all_restore_it(split: bool) -> None:
    trained = Trained().step()
    parts = [part(trained.chk, Role(rank, 2, (0, 1), split)) for rank in range(2)]
    for rank in range(2):
        fresh = Trained(scale=5.0)
        restored(fresh.chk, Manifest.merged(parts), rank, world=2)
        assert bits(fresh.scale) == bits(trained.scale)


def test_each_is_named_once_with_the_variable_that_holds_it_and_lazy_objects_are_not_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Proxy:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("not now")

    lazy, trained = Proxy(), Trained().step()
    chk = trained.chk
    take(chk), take(chk)
    (said,) = caplog.messages
    assert "trained.scale (parameter 2, float32[2])" in said
    assert 'CFCheckpoint(..., scale={"scale": trained.scale})' in said
    later = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    trained.opt.add_param_group({"params": later})
    take(chk), take(chk)
    assert len(caplog.messages) == 2
    assert "later=later" in caplog.text
    assert type(lazy) is Proxy
