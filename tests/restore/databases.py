"""Many optimizers, modules and schedulers at once: trained, checkpointed, restored, trained on.

Each case is made twice, with different seeds. The first is trained, checkpointed with all the
others of its list, and trained on; the second is restored from the disk and trained as far. Run it
in a process of its own: torch's databases change global settings at their import.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from checkfreq import CFCheckpoint, CFManager, CFMode
from tests.restore.test_round_trip import SCHEDULERS

_STEPS = 3


@dataclass
class Live:
    """What is checkpointed of one case, what trains it once (``step(number)``), what came of it."""

    tracked: dict[str, Any]
    step: Callable[[int], Any]
    parameters: Sequence[Tensor] = ()
    outputs: Sequence[Any] = ()


class Case(NamedTuple):
    """A case by name; ``make(seed)`` gives it anew."""

    name: str
    make: Callable[[int], Live]


def other_after_a_restore(cases: Sequence[Case], folder: str) -> list[str]:
    """The names of the cases that do not go on with the same bits."""
    first = [case.make(1) for case in cases]
    _train(first, range(_STEPS))
    with _manager(first, folder) as manager:
        manager.step()
        manager.save(wait=True)
    _train(first, range(_STEPS, 2 * _STEPS))
    second = [case.make(2) for case in cases]
    with _manager(second, folder) as manager:
        assert manager.restore()
    _train(second, range(_STEPS, 2 * _STEPS))
    pairs = zip(cases, first, second, strict=True)
    return [case.name for case, one, other in pairs if digest(one) != digest(other)]


def _manager(lives: Sequence[Live], folder: str) -> CFManager:
    every = {f"{k}_{i}": v for i, live in enumerate(lives) for k, v in live.tracked.items()}
    tracked = {name: one for name, one in every.items() if not isinstance(one, nn.Module)}
    # One file for all of them, and not one each.
    modules = nn.ModuleDict({n: one for n, one in every.items() if isinstance(one, nn.Module)})
    parameters = [[*live.parameters] for live in lives]
    chk = CFCheckpoint(parameters=parameters, modules=modules, rng=False, **tracked)
    return CFManager(folder, chk, mode=CFMode.MANUAL, chk_freq=0)


def _train(lives: Sequence[Live], steps: range) -> None:
    for live, number in itertools.product(lives, steps):
        torch.manual_seed(number)
        live.step(number)


def digest(live: Live) -> str:
    """Of all bits, dtypes, shapes and strides of its parameters, states and outputs."""
    found = hashlib.sha256()
    _add(found, [[*live.parameters], live.outputs])
    for name, value in live.tracked.items():
        found.update(name.encode())
        _add(found, value.state_dict())
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        tensor = value.detach()
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            found.update(repr(key).encode())
            _add(found, item)
    elif isinstance(value, list | tuple):
        found.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _add(found, item)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        found.update(type(value).__qualname__.encode())
        _add(found, vars(value))
    else:
        found.update(f"{type(value).__name__} {value!r}".encode())


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
        return Live({"optimizer": optimizer}, step, parameters)

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
) -> Callable[[int], Any]:
    def step(number: int) -> None:
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


def torch_schedulers(folder: str, kill: int) -> list[str]:
    """Every scheduler in torch's database of optimizers, and one of each class."""
    return other_after_a_restore([*_torch_schedulers()], folder)


def _torch_schedulers() -> Iterator[Case]:
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for number, makers in enumerate(info.scheduler_inputs):
            case = _scheduler_maker(info, makers)
            yield Case(f"{info.optim_cls.__name__} schedulers {number}", case)
    sgd = next(info for info in optim_db if info.optim_cls is torch.optim.SGD)
    for name, maker in SCHEDULERS.items():
        yield Case(name, _scheduler_maker(sgd, [maker]))


def _scheduler_maker(info: Any, makers: Sequence[Callable[[Optimizer], Any]]) -> Any:
    def make(seed: int) -> Live:
        live = _optimizer_maker(info, torch.float32, {"lr": 0.01})(seed)
        schedulers = [maker(live.tracked["optimizer"]) for maker in makers]
        train = live.step

        def step(number: int) -> None:
            train(number)
            for scheduler in schedulers:
                is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*[1.0 + number % 2] if is_plateau else [])

        named = {f"scheduler{i}": one for i, one in enumerate(schedulers)}
        return Live({**live.tracked, **named}, step, live.parameters)

    return make


# ---- torch's modules


def torch_modules(folder: str, kill: int) -> list[str]:
    """Every module in torch's database, in training."""
    return other_after_a_restore([*_torch_modules()], folder)


def _torch_modules() -> Iterator[Case]:
    from torch.testing._internal.common_modules import module_db

    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": True}
    for info in module_db:
        for number, one in enumerate(info.module_inputs_func(info, **options)):
            name = f"{info.module_cls.__name__} {number} {one.desc}"
            yield Case(name, _module_maker(info, one))


def _module_maker(info: Any, one: Any) -> Any:
    def make(seed: int) -> Live:
        torch.manual_seed(seed)
        built = one.constructor_input
        module = info.module_cls(*built.args, **built.kwargs).to(torch.float32).train()
        given = one.forward_input
        outputs: list[Any] = []

        def step(number: int) -> None:
            module.zero_grad()
            output = module(*given.args, **given.kwargs)
            outputs[:] = [output]
            loss = sum(t.double().square().sum() for t in _floats(output) if t.requires_grad)
            if isinstance(loss, Tensor):
                loss.backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=1e-3)

        if info.is_lazy:
            step(0)  # it has no parameters before
        return Live({"module": module}, step, outputs=outputs)

    return make


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)


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
        return Live({"optimizer": optimizer}, _stepper(optimizer, parameters), parameters)

    return make
