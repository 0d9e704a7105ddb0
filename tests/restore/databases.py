"""Many optimizers at once: trained, checkpointed, restored, trained on.

Each case is made twice, with different seeds. The first is trained, checkpointed with all the
others of its list, and trained on; the second is restored from the disk and trained as far. Run it
in a process of its own: torch's databases change global settings at their import.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from checkfreq import CFCheckpoint, CFManager, CFMode
from iterators.testing import digest


@dataclass
class Live:
    """An optimizer, its parameters, and what trains them once."""

    optimizer: Optimizer
    parameters: Sequence[Tensor]
    step: Callable[[], Any]


class Case(NamedTuple):
    """A case by name; ``make(seed)`` gives it anew."""

    name: str
    make: Callable[[int], Live]


def other_after_a_restore(cases: Sequence[Case], folder: str) -> list[str]:
    """The names of the cases that do not go on with the same bits."""
    first = [case.make(1) for case in cases]
    _train(first)
    with _manager(first, folder) as manager:
        manager.step()
        manager.save(wait=True)
    _train(first)
    second = [case.make(2) for case in cases]
    with _manager(second, folder) as manager:
        assert manager.restore()
    _train(second)
    pairs = zip(cases, first, second, strict=True)
    return [case.name for case, one, other in pairs if _bits_of(one) != _bits_of(other)]


def _manager(lives: Sequence[Live], folder: str) -> CFManager:
    optimizers = {f"optimizer_{number}": live.optimizer for number, live in enumerate(lives)}
    parameters = [[*live.parameters] for live in lives]
    chk = CFCheckpoint(parameters=parameters, rng=False, **optimizers)
    return CFManager(folder, chk, mode=CFMode.MANUAL, chk_freq=0)


def _train(lives: Sequence[Live]) -> None:
    for live, number in itertools.product(lives, range(3)):
        torch.manual_seed(number)
        live.step()


def _bits_of(live: Live) -> str:
    return digest([[*live.parameters], _plain(live.optimizer.state_dict())])


def _plain(value: Any) -> Any:
    """With the attributes of each object in its place: a digest knows no classes."""
    if isinstance(value, dict):
        return [(key, _plain(value[key])) for key in sorted(value, key=repr)]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, type | Tensor)
    return _plain(vars(value)) if has_attributes and not callable(value) else value


# ---- torch's optimizers


def torch_optimizers(folder: str, kill: int) -> list[str]:
    """Every configuration in torch's database, of each dtype and implementation."""
    return other_after_a_restore([*_torch_optimizers()], folder)


def _torch_optimizers() -> Iterator[Case]:
    from torch.testing._internal import common_optimizers as database

    for info in database.optim_db:
        dtypes = [torch.float32, torch.bfloat16]
        if info.supports_complex and info.optim_cls is not torch.optim.LBFGS:
            dtypes.append(torch.complex64)
        inputs = database._get_optim_inputs_including_global_cliquey_kwargs(
            "cpu", torch.float32, info, skip=("differentiable",)
        )
        for dtype, one in itertools.product(dtypes, inputs):
            if dtype.is_complex and one.kwargs.get("fused"):
                continue
            name = f"{info.optim_cls.__name__} {dtype} {one.desc} {one.kwargs}"
            yield Case(name, _optimizer_maker(info, dtype, one.kwargs))


def _optimizer_maker(info: Any, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    sparse = info.only_supports_sparse_grads

    def make(seed: int) -> Live:
        only_matrices = info.optim_cls is torch.optim.Muon or sparse
        shapes = [(6, 4), (3, 5)] if only_matrices else [(6, 4), (5,), ()]
        by_columns = info.optim_cls is not torch.optim.LBFGS  # it makes views of all in a row
        parameters = _parameters(seed, dtype, shapes, by_columns=by_columns)
        optimizer = info.optim_cls(parameters, **_own(options))
        step = _stepper(optimizer, parameters, sparse)
        return Live(optimizer, parameters, step)

    return make


def _own(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with tensors of their own: an optimizer writes to a tensor ``lr``."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}


def _parameters(
    seed: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], *, by_columns: bool = True
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if by_columns:
        values[0] = values[0].t().contiguous().t()
    return [nn.Parameter(value.to(dtype)) for value in values]


def _stepper(
    optimizer: Optimizer, parameters: Sequence[Tensor], sparse: bool = False
) -> Callable[[], Any]:
    def step() -> None:
        def closure() -> Tensor:
            for parameter in parameters:
                # Of the parameter too, so that a different one has other moments.
                gradient = torch.randn_like(parameter) + parameter.detach()
                parameter.grad = gradient.to_sparse(1) if sparse else gradient
            return torch.stack([p.detach().abs().double().sum() for p in parameters]).sum()

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()

    return step


# ---- torch's schedulers


# ---- torch's modules


# ---- pytorch_optimizer


def zoo(folder: str, kill: int) -> list[str]:
    """The optimizers of ``pytorch_optimizer`` that can be made of nothing but parameters."""
    return other_after_a_restore([*_zoo()], folder)


#: Not made here: what needs a model, second derivatives, two passes, a group of ranks, or a scaler.
_NOT_HERE = frozenset(
    (
        *("AdaHessian", "AdaLOMO", "AdamMini", "DeMo", "DistributedMuon", "FriendlySAM", "GSAM"),
        *("LOMO", "LookSAM", "LoRARite", "MuonClip", "PCGrad", "SAM", "SafeFP16Optimizer"),
        *("SophiaH", "WSAM"),
    )
)
_WRAPPERS = ("Lookahead", "Magma", "OrthoGrad", "ScheduleFreeWrapper", "TRAC")
_OPTIONS = {"BSAM": {"num_data": 100}, "Ranger21": {"num_iterations": 100}}


def _zoo() -> Iterator[Case]:
    import pytorch_optimizer as library

    for name, kind in sorted(vars(library).items()):
        is_one = isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
        if is_one and name not in _NOT_HERE:
            yield Case(name, _zoo_maker(name, kind))


def _zoo_maker(name: str, kind: Any) -> Any:
    def make(seed: int) -> Live:
        parameters = _parameters(seed, torch.float32, [(12, 8), (5, 6)], by_columns=False)
        if name in _WRAPPERS:
            optimizer = kind(torch.optim.AdamW(parameters, lr=1e-2))
        else:
            groups = [{"params": parameters, "use_muon": True}]
            given = groups if "Mu" in name or name == "AdaGO" else parameters
            optimizer = kind(given, lr=1e-2, **_OPTIONS.get(name, {}))
        if hasattr(optimizer, "train"):
            optimizer.train()
        return Live(optimizer, parameters, _stepper(optimizer, parameters))

    return make
