"""Frozen parameters get a file of their own, and nothing that an update or a forward changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState

#: A square layer of so many features has more than the least size that is worth a file.
WIDE = 600


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as LoRA has it."""

    def __init__(self, width: int = WIDE) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def captured(model: nn.Module, **options: Any) -> CapturedState:
    trained = [p for p in model.parameters() if p.requires_grad]
    others = options.pop("others", {})
    optimizer = torch.optim.SGD(trained, lr=0.1)
    chk = CFCheckpoint(rng=False, model=model, optimizer=optimizer, **others, **options)
    return capture(chk)


def files(state: CapturedState) -> dict[str, list[str]]:
    """Keys by file."""
    found: dict[str, list[str]] = {}
    for ref in state.tensors:
        found.setdefault(ref.stem, []).append(ref.key)
    return found


def test_what_is_frozen_beside_trained_parameters_has_a_file_of_its_own_until_it_is_thawed() -> (
    None
):
    """In a module with its own ``state_dict`` too."""
    model = Adapted()
    expected = {
        "model": ["down.weight", "up.weight"],
        "model.frozen": ["base.weight", "base.bias"],
    }
    assert files(captured(model)) == expected
    model.register_state_dict_post_hook(lambda *args: None)
    assert files(captured(model)) == expected
    model.base.requires_grad_(True)
    assert list(files(captured(model))) == ["model"]


def test_what_is_declared_volatile_or_a_buffer_or_rewritten_by_its_layer_is_not_frozen() -> None:
    model = Adapted()
    model.register_buffer("statistics", torch.zeros(1 << 20))
    model.words = nn.Embedding(WIDE, WIDE, max_norm=1.0).requires_grad_(False)
    others = {"teacher": nn.Linear(WIDE, WIDE).requires_grad_(False)}  # no optimizer has it
    found = files(captured(model, volatile=("model.base.bias",), others=others))
    assert found["model.frozen"] == ["base.weight"]
    assert "teacher.frozen" not in found


def test_tied_frozen_weights_are_kept_once_and_named_in_their_file() -> None:
    model = Adapted()
    model.head = nn.Linear(WIDE, WIDE, bias=False)
    model.head.weight = model.base.weight
    state = captured(model)
    assert state.aliases == {"model.frozen": {"head.weight": "base.weight"}}
    assert state.objects["model"]["aliases"] == {"head.weight": "base.weight"}


def test_a_frozen_weight_that_shares_its_memory_with_a_trained_one_is_not_frozen() -> None:
    for first in ("base", "head"):
        model = Adapted()
        head = nn.Parameter(model.base.weight.detach())
        if first == "base":
            model.head = head
        else:
            base = model.base
            del model.base
            model.head, model.base = head, base
        found = files(captured(model))
        assert not any("weight" in key for key in found.get("model.frozen", [])), first
