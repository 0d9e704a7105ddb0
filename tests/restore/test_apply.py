"""Restoring: every mismatch is listed and nothing changed, or all of it is put in place."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkfreq.errors import ConfigError, MismatchError, StateError
from checkfreq.restore.apply import materialise
from checkfreq.state.checkpoint import CFCheckpoint
from tests.state.support import bits, plan, restore, state_bits, take


def adamw(model: nn.Module, *, steps: int = 1, **kwargs: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def run(width: int = 3, **kwargs: Any) -> CFCheckpoint:
    model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))
    return CFCheckpoint(model=model, optimizer=adamw(model, **kwargs), best={"loss": 0.25})


def two_layers(*, tied: bool = False) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if tied:
        made[1].weight = made[0].weight
    return made


def sgd_in_groups() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p]} for p in nn.Linear(1, 1).parameters()], lr=1)


ONES, ZEROS, SHARED = torch.ones(2), torch.zeros(2), torch.full((2,), 7.0)

#: What is saved, what is live, and how that is said.
DIFFERENT: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "dtype": (
        lambda: nn.Linear(2, 2),
        lambda: nn.Linear(2, 2).bfloat16(),
        r"float32\[2, 2\], live is bfloat16\[2, 2\]",
    ),
    "kind": (dict, lambda: nn.Linear(1, 1), "x: checkpoint holds a dict, live is a module"),
    "optimizer": (
        lambda: torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1),
        lambda: torch.optim.Adam(nn.Linear(1, 1).parameters()),
        r"of a torch\.optim\.sgd\.SGD, live is a .*Adam",
    ),
    "groups": (
        lambda: torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1),
        sgd_in_groups,
        r"groups of \[2\] parameters, live has \[1, 1\]",
    ),
    "order of parameters": (
        lambda: adamw(nn.Linear(3, 2)),
        lambda: torch.optim.AdamW([*nn.Linear(3, 2).parameters()][::-1]),
        r"x parameter 0: .*\[2, 3\], live has \[2\]",
    ),
    "scaler": (
        lambda: torch.amp.GradScaler("cpu"),
        lambda: torch.amp.GradScaler("cpu", enabled=False),
        "checkpoint has it enabled, live is disabled",
    ),
    "tied": (
        two_layers,
        lambda: two_layers(tied=True),
        r"x\.1\.weight: live is tied to 0\.weight, checkpoint has two tensors",
    ),
}


class TestMismatch:
    def test_everything_that_differs_is_listed_at_once_and_nothing_changes(self) -> None:
        saved = CFCheckpoint(
            model=nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), old={"x": 1}, rng=False
        )
        model = nn.Sequential(nn.Linear(2, 4), nn.Identity(), nn.Linear(4, 1))
        live = CFCheckpoint(model=model, new={"y": 2})
        before = state_bits(live)
        with pytest.raises(MismatchError) as caught:
            plan(live, take(saved))
        error = caught.value
        assert error.path == "chk/step-00000003"
        assert set(error.missing) == {
            "model.2.weight",
            "model.2.bias",
            "new (the whole object)",
            "rng (random generators)",
        }
        assert set(error.unexpected) == {
            "old (the whole object)",
            *(
                f"model.1.{n}"
                for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
            ),
        }
        assert set(error.different) == {
            "model.0.weight: checkpoint has float32[3, 2], live is float32[4, 2]",
            "model.0.bias: checkpoint has float32[3], live is float32[4]",
        }
        assert state_bits(live) == before
        assert "strict=False" in str(error)

    @pytest.mark.parametrize("what", DIFFERENT)
    def test_what_differs_is_named_with_both_sides(self, what: str) -> None:
        saved, live, words = DIFFERENT[what]
        with pytest.raises(MismatchError, match=words):
            plan(CFCheckpoint(x=live()), take(CFCheckpoint(x=saved())))


class TestPartial:
    def test_a_generator_of_an_absent_device_is_left_alone_and_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        shot = take(CFCheckpoint())
        shot.found.manifest.objects["rng"]["state"]["xpu:7"] = {"$tensor": "torch"}
        with caplog.at_level(logging.WARNING):
            restore(CFCheckpoint(), shot)
        assert "rng.xpu:7: not restored, this process has" in caplog.text

    def test_without_strict_a_module_is_cast_to_the_live_dtype(self) -> None:
        saved, live = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()
        restore(CFCheckpoint(m=live), take(CFCheckpoint(m=saved)), strict=False)
        assert bits(live.weight) == bits(saved.weight.bfloat16())

    def test_positions_are_handed_over_unless_excluded(self) -> None:
        chk = run()
        found = {"train": {"epoch": 2, "batch": 7}, "val": {"epoch": 0}}
        shot = take(chk, positions=found)
        assert plan(chk, shot).positions == found
        assert plan(chk, shot, exclude=("val",)).positions == {"train": found["train"]}
        assert plan(chk, shot, only=("model",)).positions == {}


class TestInPlace:
    def test_live_tensors_keep_their_storage(self) -> None:
        def addresses() -> list[int]:
            tensors = [*live.tracked["model"].state_dict().values()]
            states = live.optimizers["optimizer"].state.values()
            return [one.data_ptr() for one in (*tensors, *(t for s in states for t in s.values()))]

        saved, live = run(), run()
        before = addresses()
        restore(live, take(saved))
        assert state_bits(live) == state_bits(saved)
        assert addresses() == before

    @pytest.mark.parametrize(
        ("saved", "live"),
        [
            pytest.param([torch.ones(2), 3], {}, id="no dict"),
            pytest.param({"a": ONES, "b": [ONES]}, {"a": ZEROS, "b": [ZEROS + 1]}, id="aliased"),
            pytest.param({"a": ZEROS, "b": ONES}, {"a": SHARED, "b": SHARED}, id="two in one"),
        ],
    )
    def test_state_of_any_form_comes_back(self, saved: Any, live: Any) -> None:
        parameter = nn.Parameter(torch.zeros(2))
        one, other = (torch.optim.SGD([parameter], lr=1) for _ in range(2))
        one.state[parameter], other.state[parameter] = saved, deepcopy(live)
        shot = take(CFCheckpoint(o=one, p=[parameter]))
        assert bits(materialise(shot.found, path="p")["o"]) == bits(one.state_dict())
        restore(CFCheckpoint(o=other, p=[parameter]), shot)
        found = other.state[parameter]
        assert bits(found) == bits(saved)
        if "b" in saved and isinstance(saved["b"], list):
            assert found["a"] is found["b"][0]

    def test_nested_state_is_where_an_optimizer_holds_on_to_it(self) -> None:
        def make(value: float) -> tuple[torch.optim.Optimizer, Tensor]:
            parameter, factor = nn.Parameter(torch.zeros(2)), torch.full((3,), value)
            made = torch.optim.SGD([parameter], lr=1)
            made.state[parameter] = {"shampoo": {"block_0": {"factors": [factor]}}, 0: None}
            return made, factor

        (saved, _), (live, factor) = make(2.0), make(1.0)
        restore(CFCheckpoint(o=live), take(CFCheckpoint(o=saved)))
        assert factor.tolist() == [2.0] * 3
        assert bits(live.state_dict()) == bits(saved.state_dict())

    def test_a_tensor_learning_rate_stays_the_same_tensor(self) -> None:
        model = nn.Linear(1, 1)
        rate = torch.tensor(0.5)
        live = torch.optim.Adam(model.parameters(), lr=rate)
        for lr in (torch.tensor(0.125), 0.25):
            saved = torch.optim.Adam(model.parameters(), lr=lr)
            restore(CFCheckpoint(o=live), take(CFCheckpoint(o=saved)))
            assert live.param_groups[0]["lr"] is rate
            assert rate.item() == lr


class TestHyperParameters:
    def test_options_of_how_to_compute_stay_those_of_the_script(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        saved, live = run(foreach=True), run(fused=True)
        with caplog.at_level(logging.WARNING):
            restore(live, take(saved))
        group = live.optimizers["optimizer"].param_groups[0]
        assert group["fused"] is True
        assert group["foreach"] is None
        (record,) = caplog.records
        assert ".fused: True, where the checkpoint has None" in record.getMessage()


class WithExtra(nn.Module):
    """Extra state of a number and a tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.extra: Any = {"count": count, "tensor": torch.full((2,), float(count))}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if state == "bad":
            raise ValueError("bad extra state")
        self.extra = state


class Unpickling(nn.Module):
    """Extra state is a pickle in a tensor of bytes, as TransformerEngine's is."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(self.value)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.value = pickle.loads(bytes(state.tolist()))


class Renaming(nn.Linear):
    """Saves and loads in a way of its own."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = torch.cat([self.weight, self.bias[:, None]], 1).detach()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        packed = state[prefix + "packed"]
        self.weight = nn.Parameter(packed[:, :-1])
        self.bias = nn.Parameter(packed[:, -1])


class GrowsByMethod(nn.Module):
    """A buffer that grows, which its own loading code resizes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.resize = self._resize
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x])
        return x

    def _resize(self, state: Any, prefix: str, *args: Any) -> None:
        self.seen = torch.empty_like(state[prefix + "seen"])

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self.resize(state, prefix)
        super()._load_from_state_dict(state, prefix, *args, **kwargs)


class GrowsByHook(GrowsByMethod):
    """The same by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda module, *args: module.resize(*args))

    _load_from_state_dict = nn.Module._load_from_state_dict


class TestModules:
    def test_extra_state_comes_back_whether_there_are_hooks_or_not(self) -> None:
        saved, live = nn.Sequential(WithExtra(3)), nn.Sequential(WithExtra(1))
        restore(CFCheckpoint(m=live), take(CFCheckpoint(m=saved)))
        assert bits(live.state_dict()) == bits(saved.state_dict())
        live = nn.Sequential(WithExtra(2))
        saved.register_state_dict_post_hook(lambda *args: None)
        live.register_load_state_dict_post_hook(lambda *args: None)
        restore(CFCheckpoint(m=live), take(CFCheckpoint(m=saved)))
        assert bits(live.state_dict()) == bits(saved.state_dict())

    def test_failing_set_extra_state_changes_nothing(self) -> None:
        saved = WithExtra(1)
        saved.extra = "bad"
        live = WithExtra(2)
        before = bits(live.state_dict())
        with pytest.raises(StateError, match=r"^m\._extra_state: .*bad extra state"):
            plan(CFCheckpoint(m=live), take(CFCheckpoint(m=saved))).apply()
        assert bits(live.state_dict()) == before

    def test_extra_state_that_was_changed_later_reaches_no_code_of_the_users(self) -> None:
        saved = nn.Sequential(Unpickling("first"), Unpickling("second"))
        shot = take(CFCheckpoint(rng=False, m=saved))
        json = shot.found.manifest.objects["m"]
        codes = json["extra_codes"]
        live = CFCheckpoint(rng=False, m=nn.Sequential(Unpickling("a"), Unpickling("b")))
        for forged in (
            dict.fromkeys(codes, "f" * 64),
            {},
            dict.fromkeys(codes),
            dict(zip(codes, reversed(codes.values()), strict=True)),
        ):
            json["extra_codes"] = forged
            with pytest.raises(ConfigError, match="is not given to"):
                restore(live, shot)
        json["extra_codes"] = codes
        restore(live, shot)
        assert bits(live.tracked["m"].state_dict()) == bits(saved.state_dict())

    def test_a_module_with_its_own_format_uses_it_both_ways(self) -> None:
        saved, live = nn.Sequential(Renaming(2, 3)), nn.Sequential(Renaming(2, 3))
        shot = take(CFCheckpoint(rng=False, m=saved))
        assert [t.name for t in shot.layout.files[0].tensors] == ["0.packed"]
        restore(CFCheckpoint(rng=False, m=live), shot)
        assert bits(live.state_dict()) == bits(saved.state_dict())

    @pytest.mark.parametrize("kind", [GrowsByMethod, GrowsByHook])
    def test_a_buffer_takes_the_shape_that_the_loading_code_of_its_module_gives_it(
        self, kind: type[nn.Module]
    ) -> None:
        saved, live = nn.Sequential(kind()), nn.Sequential(kind())
        saved(torch.ones(3))
        restore(CFCheckpoint(m=live), take(CFCheckpoint(m=saved)))
        assert bits(live.state_dict()) == bits(saved.state_dict())

    def test_a_shape_that_the_loading_code_leaves_as_it_is_changes_nothing(self) -> None:
        saved, live = GrowsByHook(), GrowsByHook()
        saved(torch.ones(3))
        live.resize = lambda *_: None
        before = bits(live.state_dict())
        with pytest.raises(StateError, match=r"(?s)size mismatch for seen.*nothing was changed"):
            plan(CFCheckpoint(m=live), take(CFCheckpoint(m=saved))).apply()
        assert bits(live.state_dict()) == before


class TestHookedOptimizers:
    @pytest.mark.parametrize("side", ["save", "load"])
    def test_state_comes_back_through_state_dict_hooks(self, side: str) -> None:
        saved, live = run(), run(steps=0)
        if side == "save":
            saved.optimizers["optimizer"].register_state_dict_post_hook(lambda *args: None)
        else:
            live.optimizers["optimizer"].register_load_state_dict_post_hook(lambda *args: None)
        shot = take(saved)
        found = materialise(shot.found, path="p")["optimizer"]
        assert bits(found) == bits(saved.optimizers["optimizer"].state_dict())
        restore(live, shot)
        assert state_bits(live) == state_bits(saved)


@pytest.mark.parametrize("where", ["model", "optimizer", "optimizer.state.0.exp_avg"])
def test_what_is_on_the_meta_device_is_refused(where: str) -> None:
    shot, chk = take(run()), run()
    if where.endswith("exp_avg"):
        for state in chk.tracked["optimizer"].state.values():
            state["exp_avg"] = state["exp_avg"].to("meta")
    else:
        chk.tracked["model"].to("meta")
        (group,) = chk.tracked["optimizer"].param_groups
        group["params"] = [*chk.tracked["model"].parameters()]
    with pytest.raises(StateError, match=rf"{where}.*: .*meta device"):
        restore(chk, shot, only=where.partition(".")[0])
