"""CFCheckpoint: the named stateful objects that are checkpointed together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from checkfreq.errors import ConfigError, StateError
from checkfreq.state.adapters.base import Adapter
from checkfreq.state.adapters.generic import DictAdapter, ListAdapter, ObjectAdapter
from checkfreq.state.adapters.module import ModuleAdapter
from checkfreq.state.adapters.optimizer import OptimizerAdapter
from checkfreq.state.adapters.scaler import ScalerAdapter
from checkfreq.state.given import is_scheduler_of
from checkfreq.state.tensors import require_kept
from checkfreq.state.wrappers import unwrapped


class CFCheckpoint:
    """What a checkpoint holds: ``CFCheckpoint(model=model, optimizer=optimizer)``.

    Each keyword is a name and an object with ``state_dict``/``load_state_dict``, or a plain
    dict or list, which is restored in place, with the dicts, lists and tensors in it. ``rng`` adds
    the random generators of Python, NumPy, torch and of the devices that hold tracked tensors.

    ``settled`` and ``volatile`` name objects, tensors or prefixes ("ema", "model.head.weight")
    that are not what they would be by default. A settled tensor is changed by weight updates only,
    so its copy may overlap with the next forward and backward pass. When in doubt, volatile.

    ``per_rank`` names state that differs from rank to rank ("meters"): a whole object, or tensors
    of a module ("model.bn1", prefixes too). Each rank saves and restores its own. These need not be
    named: random generators, iterators' positions, buffers of a tracked DistributedDataParallel
    with ``broadcast_buffers=False``, statistics of batch norms under ``fully_shard``. A rank that
    did not exist when the checkpoint was taken keeps its live generators and the state that was
    named, and takes the first rank's buffers.

    Gradients that wait for an update after the boundary (accumulation across it) are kept for each
    rank, with the tracked optimizer that will use them, and are restored if there are as many ranks
    as before. Sparse gradients are not kept, nor are those that FSDP2 accumulates outside ``.grad``
    under ``set_requires_gradient_sync(False)``.

    If a wrapper only passes calls on, as those that accelerate's ``prepare`` returns do, the
    optimizer or scheduler inside it is tracked.

    Raises StateError for an object that has no state to keep and for tensors on a device whose
    memory cannot be read (XLA, MPS and others: the CPU, CUDA and ROCm are supported), ConfigError
    for names that contradict each other.
    """

    def __init__(
        self,
        *,
        rng: bool = True,
        settled: Iterable[str] = (),
        volatile: Iterable[str] = (),
        per_rank: Iterable[str] = (),
        **tracked: Any,
    ) -> None:
        self.rng = rng
        self.settled = _names("settled", settled, tracked)
        self.volatile = _names("volatile", volatile, tracked)
        self.per_rank = _names("per_rank", per_rank, tracked)
        both = sorted({*self.settled} & {*self.volatile})
        if both:
            raise ConfigError(f"CFCheckpoint: {', '.join(both)} cannot be settled and volatile")
        for name, value in tracked.items():
            _require_stateful(name, value)
        self._given = dict(tracked)
        self._tracked = {name: unwrapped(name, value) for name, value in tracked.items()}
        optimizers = [*self.optimizers.values()]
        self._adapters = {
            name: self._adapter(name, one, optimizers) for name, one in self._tracked.items()
        }
        self._require_own_modules()
        for name, value in self._tracked.items():
            _require_kept_devices(name, value)

    @property
    def tracked(self) -> Mapping[str, Any]:
        """Names and objects, in the order given; instead of a wrapper, the object inside."""
        return MappingProxyType(self._tracked)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapter that reads and restores each tracked object."""
        return MappingProxyType(self._adapters)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The tracked optimizers."""
        return {n: value for n, value in self._tracked.items() if isinstance(value, Optimizer)}

    @property
    def steppers(self) -> dict[str, Optimizer]:
        """The tracked optimizers as given: with their wrappers, whose ``step`` may do more."""
        return {name: self._given[name] for name in self.optimizers}

    @property
    def per_rank_objects(self) -> frozenset[str]:
        """Tracked objects that differ from rank to rank as a whole."""
        return frozenset(self.per_rank) & frozenset(self._tracked)

    def trained_ids(self) -> frozenset[int]:
        """``id`` of every parameter that a tracked optimizer updates, as of now."""
        return frozenset(
            [
                id(parameter)
                for optimizer in self.optimizers.values()
                for group in optimizer.param_groups
                for parameter in group["params"]
            ]
        )

    def _adapter(self, name: str, value: Any, optimizers: list[Optimizer]) -> Adapter:
        if isinstance(value, nn.Module):
            return ModuleAdapter(name, value)
        if isinstance(value, Optimizer):
            return OptimizerAdapter(name, value)
        if isinstance(value, GradScaler) and type(value).state_dict is GradScaler.state_dict:
            return ScalerAdapter(name, value)
        if isinstance(value, dict) and not hasattr(value, "state_dict"):
            return DictAdapter(name, value)
        if isinstance(value, list) and not hasattr(value, "state_dict"):
            return ListAdapter(name, value)
        return ObjectAdapter(name, value, is_scheduler=is_scheduler_of(value, optimizers))

    def _require_own_modules(self) -> None:
        for name in self.per_rank:
            owner = name.partition(".")[0]
            if name != owner and self._adapters[owner].kind != "module":
                raise ConfigError(
                    f"CFCheckpoint(per_rank=...): {name!r} is inside of a "
                    f"{self._adapters[owner].kind}, of which only the whole can differ from rank "
                    f"to rank; expected {owner!r}"
                )


def _names(argument: str, names: Iterable[str], tracked: Mapping[str, Any]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name.partition(".")[0] not in tracked:
            raise ConfigError(
                f"CFCheckpoint({argument}=...): {name!r} does not begin with a tracked name; "
                f"expected one of {', '.join(tracked) or 'none'}"
            )
    return names


def _require_kept_devices(name: str, value: Any) -> None:
    """Refuse what is on a device of an unsupported kind; the meta device may be left later."""
    for key, tensor in tensors_of(value):
        if not tensor.is_meta:
            require_kept(f"{name}.{key}", tensor.device)


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that can be found without asking for a state dict."""
    if isinstance(value, nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    elif isinstance(value, Optimizer):
        for group in value.param_groups:
            yield from ((f"parameter {number}", p) for number, p in enumerate(group["params"]))
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((str(key), one) for key, one in items if isinstance(one, Tensor))


def _require_stateful(name: str, value: Any) -> None:
    if not name.isidentifier():
        raise StateError(f"CFCheckpoint: {name!r} cannot name a file; use a Python identifier")
    if isinstance(value, dict):
        return
    if isinstance(value, list) and not hasattr(value, "state_dict"):
        _require_plain_items(name, value)
        return
    methods = (getattr(value, method, None) for method in ("state_dict", "load_state_dict"))
    if isinstance(value, type) or not all(callable(method) for method in methods):
        what = f"the class {value.__qualname__}" if isinstance(value, type) else _describe(value)
        raise StateError(
            f"CFCheckpoint({name}=...): {what} has no state that can be kept; expected an object "
            "with state_dict() and load_state_dict(), or a plain dict or list, which are filled in "
            "place. Leave it out, or give it those methods"
        )


def _require_plain_items(name: str, values: list[Any]) -> None:
    for number, value in enumerate(values):
        if hasattr(value, "load_state_dict"):
            raise StateError(
                f"CFCheckpoint({name}=...): item {number} of the list is {_describe(value)}, an "
                "object with a state of its own; expected plain values in a list. Give each such "
                f"object a name: CFCheckpoint({name}_{number}=...)"
            )


def _describe(value: object) -> str:
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"
