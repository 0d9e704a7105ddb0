"""torch.nn.Module: parameters and buffers under canonical names, and extra state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from checkfreq.state.adapters.base import (
    Changes,
    Fallible,
    Filled,
    Findings,
    Holdings,
    type_name,
)
from checkfreq.state.adapters.composed_load import ComposedLoad
from checkfreq.state.adapters.flags import Flags
from checkfreq.state.adapters.generic import live_dtensors
from checkfreq.state.collector import StateCollector
from checkfreq.state.composed import described, is_composed, take_apart
from checkfreq.state.dtensors import is_dtensor, local_of, tensor_types
from checkfreq.state.names import EXTRA_STATE, ModuleIndex, Node, persistent_tensors
from checkfreq.state.origin import code_of, require_own
from checkfreq.state.saved import SavedObject
from checkfreq.state.saved_tensor import local_part
from checkfreq.state.sharding import require_shards_that_are_known
from checkfreq.state.tensors import DTYPE_NAMES, DTYPES, LAZY, is_ordinary, require_memory
from checkfreq.store.boxes import Box
from checkfreq.types import Json

#: Decodes extra state by its name, with these live DTensors; ConfigError if it is a stranger's.
Give = Callable[[str, Mapping[str, Tensor]], Any]


class ModuleAdapter:
    """Reads a module directly, or through ``state_dict()`` if it has hooks or overrides."""

    kind = "module"

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._index = ModuleIndex(module)
        self._flags = Flags(self._index.nodes)

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """See Adapter."""
        self._refresh()
        if self._index.saves_its_own_way:
            extra = self._capture_state_dict(collector)
        else:
            extra = self._capture_directly(collector)
        hidden = self._capture_non_persistent(collector)
        direct, begin = {*collector.keys}, len(collector.refs)
        trees = {
            key: collector.encode(value, f"{self._name}.{key}") for key, value in extra.items()
        }
        json: dict[str, Json] = {"kind": self.kind, "class": type_name(self._module)}
        json["flags"] = self._flags.record(self._index.nodes)
        if hidden:
            json["non_persistent"] = hidden
        if trees:
            collector.made_anew(begin)
            json["extra"] = trees
            json["extra_codes"] = {
                key: code_of(value, f"{self._name}.{key}")
                for key, value in extra.items()
                if _may_run_code(key, trees[key])
            }
            json["extra_tensors"] = [key for key in collector.keys if key not in direct]
        return json

    def _refresh(self) -> None:
        self._index.refresh()
        require_shards_that_are_known(self._name, (node.module for node in self._index.nodes))

    def _capture_directly(self, collector: StateCollector) -> dict[str, Any]:
        add, hold, trained_ids = collector.add, collector.held.ids.add, collector.trained_ids
        nodes = self._index.nodes
        trained = self._is_trained(trained_ids)
        extra = {}
        for node in nodes:
            module, steady = node.module, trained and node.weights_settled
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    hold(id(parameter))
                    settled = steady and _settled(parameter, trained_ids)
                    frozen = settled and id(parameter) not in trained_ids
                    add(node.name(attribute), parameter, settled, frozen)
            for attribute, buffer in module._buffers.items():
                if buffer is not None and attribute not in module._non_persistent_buffers_set:
                    key = add(node.name(attribute), buffer, False)
                    if node.per_rank_buffers:
                        collector.per_rank.add((self._name, key))
            if node.extra:
                extra[node.name(EXTRA_STATE)] = node.module.get_extra_state()
        return extra

    def _capture_non_persistent(self, collector: StateCollector) -> list[str]:
        """Add the buffers that are no part of the state dict; returns their keys.

        Left out are those that cannot be kept as they are, and those that are tied to what is there
        already.
        """
        found = []
        for node, attribute, buffer in self._non_persistent():
            name = node.name(attribute)
            if buffer is None or name in collector.keys:
                continue
            if not is_dtensor(buffer) and not (is_ordinary(buffer) and buffer.data_ptr()):
                continue
            if collector.add(name, buffer, False) != name:
                collector.drop_alias(name)
                continue
            found.append(name)
            collector.non_persistent.add((self._name, name))
            if node.per_rank_buffers:
                collector.per_rank.add((self._name, name))
        return found

    def _non_persistent(self) -> Iterator[tuple[Node, str, Tensor | None]]:
        for node in self._index.nodes:
            for attribute in sorted(node.module._non_persistent_buffers_set):
                buffer = node.module._buffers.get(attribute)
                if not isinstance(buffer, LAZY):
                    yield node, attribute, buffer

    def _filled_non_persistent(self, saved: SavedObject, findings: Findings) -> list[Filled]:
        """Those that the checkpoint has, in the same shape and dtype; all others stay, and are
        noted if the checkpoint has something else."""
        found = []
        hidden = set(saved.field("non_persistent", []))
        for node, attribute, live in self._non_persistent():
            name = node.name(attribute)
            if name not in hidden or saved.is_of_other_ranks(name):
                continue
            record = saved.record(name)
            is_kept = live is not None and (is_dtensor(live) or is_ordinary(live))
            form = (record.shape, DTYPES[record.dtype])
            if live is not None and is_kept and (tuple(live.shape), live.dtype) == form:
                saved.require(name, live)
                found.append(Filled(f"{self._name}.{name}", live, record))
                continue
            there = None if live is None else f"{live.dtype}{[*live.shape]}".removeprefix("torch.")
            findings.notes.append(
                f"{self._name}.{name}, a buffer with persistent=False: live is {there}, where the "
                f"checkpoint has {record.dtype}{[*record.shape]}"
            )
        return found

    def _is_trained(self, trained_ids: frozenset[int]) -> bool:
        # Frozen weights of a module that no optimizer updates may be a teacher's or an average's,
        # which other code writes at any time.
        return any(
            id(parameter) in trained_ids
            for node in self._index.nodes
            for parameter in node.module._parameters.values()
        )

    def _capture_state_dict(self, collector: StateCollector) -> dict[str, Any]:
        state = self._module.state_dict()
        names = self._index.canonical_names(state)
        settled, frozen, volatile = self._addresses(collector.trained_ids)
        names_per_rank, addresses = self._per_rank_buffers()
        extra = {}
        for raw, value in state.items():
            name = names[raw]
            if isinstance(value, Tensor) and not _is_extra(raw):
                address = _address(value)
                is_settled = address in settled and address not in volatile
                key = collector.add(name, value, is_settled, is_settled and address in frozen)
                if address in addresses or name in names_per_rank:
                    collector.per_rank.add((self._name, key))
            else:
                extra[name] = value
        return extra

    def _per_rank_buffers(self) -> tuple[set[str], set[int]]:
        """Names and addresses of buffers that differ from rank to rank.

        Addresses too, since hooks may rename entries of the state dict.
        """
        found = self._index.per_rank_buffers()
        return {*found}, {*map(_address, found.values())} - {0}

    def _addresses(self, trained_ids: frozenset[int]) -> tuple[set[int], set[int], set[int]]:
        """Addresses of settled parameters, of the frozen ones of them, and of everything else."""
        settled, volatile = {0}, {0}  # 0: no elements, or no memory yet
        trained_here: set[int] = set()
        trained = self._is_trained(trained_ids)
        for node in self._index.nodes:
            steady = trained and node.weights_settled
            for _, tensor, is_parameter in persistent_tensors(node):
                fixed = steady and is_parameter and _settled(tensor, trained_ids)
                (settled if fixed else volatile).add(_address(tensor))
                if id(tensor) in trained_ids:
                    trained_here.add(_address(tensor))
        return settled, settled - trained_here, volatile

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """See Adapter."""
        self._refresh()
        trees: dict[str, Json] = saved.field("extra", {})
        dtensors = self._live_dtensors() if trees else {}
        for tree in trees.values():
            saved.own_tree(tree, live=dtensors)
        names = module_tensors(saved)
        live, there = self._live_tensors(), {*names}
        extras = self._live_extras()
        kept = [name for name in live if saved.is_of_other_ranks(name)]
        for name in kept:
            findings.notes.append(f"{self._name}.{name}: each rank had its own, this one had none")
            del live[name]
        findings.compare_names(self._name, [*names, *trees], [*live, *extras])
        fitting = {
            name: tensor
            for name, tensor in live.items()
            if name in there
            and (
                self._is_resized_by_load(name, tensor, saved, findings)
                or fits(self._name, name, tensor, saved, findings)
            )
        }
        self._compare_ties(fitting, saved, findings)
        common = {name: node for name, node in extras.items() if name in trees}
        hidden = self._filled_non_persistent(saved, findings)
        nodes = self._index.nodes
        flags = self._flags.prepare(nodes, saved, findings, known=there) if findings.resumes else []
        give = partial(self._extra_state, saved, trusts=findings.trusts)
        if self._index.loads_its_own_way or self._index.saves_its_own_way:
            strict = not findings.mismatches
            for name, tensor in fitting.items():
                saved.own(name, live=tensor)
            load = self._by_load_state_dict(
                saved, fitting, {*common}, give, strict=strict, kept=kept
            )
            return Changes(fallible=[load], filled=hidden, sets=flags)
        changes = self._directly(saved, fitting, common, give)
        changes.filled += hidden
        changes.sets += flags
        return changes

    def _is_resized_by_load(
        self, name: str, live: Tensor, saved: SavedObject, findings: Findings
    ) -> bool:
        """Whether a shape that differs is left to the module's own loading code.

        What that does not resize, ``load_state_dict`` refuses, and the load is undone.
        """
        if not findings.strict or name in saved.composed or not is_ordinary(live):
            return False
        record = saved.record(name)
        is_resized = DTYPES[record.dtype] is live.dtype and tuple(live.shape) != record.shape
        return is_resized and self._index.may_resize(name)

    def holdings(self) -> Holdings:
        """See Adapter."""
        self._refresh()
        live = {**self._live_tensors(), **self._live_dtensors()}
        hidden = self._non_persistent()
        live.update((node.name(one), tensor) for node, one, tensor in hidden if tensor is not None)

        def of(key: str, shape: tuple[int, ...]) -> Iterator[Box]:
            if key in live and not isinstance(live[key], LAZY):
                yield local_part(live[key])[1]
            elif EXTRA_STATE in key or key.partition(":")[0] in live:
                yield Box.whole(shape)

        return of

    def _live_tensors(self) -> dict[str, Tensor]:
        if not self._index.saves_its_own_way:
            found: dict[str, Tensor] = {}
            for node in self._index.nodes:
                found.update((key, tensor) for key, tensor, _ in persistent_tensors(node))
            return found
        state = self._module.state_dict()
        names = self._index.canonical_names(state)
        return {
            names[raw]: value
            for raw, value in state.items()
            if isinstance(value, Tensor) and not _is_extra(raw)
        }

    def _live_extras(self) -> dict[str, Node | None]:
        if not self._index.saves_its_own_way:
            return {n.name(EXTRA_STATE): n for n in self._index.nodes if n.extra}
        state = self._module.state_dict()
        names = self._index.canonical_names(state)
        return {
            names[raw]: None
            for raw, value in state.items()
            if not isinstance(value, Tensor) or _is_extra(raw)
        }

    def _live_dtensors(self) -> Mapping[str, Tensor]:
        """By key, the live DTensors that extra state may hold."""
        if len(tensor_types()) == 1:
            return {}
        extras = {
            name: node.module.get_extra_state() if node is not None else self._extra_of(name)
            for name, node in self._live_extras().items()
        }
        in_extras = live_dtensors(self._name, lambda: extras)
        live = self._live_tensors() if extras else {}
        return {**{key: tensor for key, tensor in live.items() if is_dtensor(tensor)}, **in_extras}

    def _extra_of(self, name: str) -> Any:
        state = self._module.state_dict()
        raws = {canonical: raw for raw, canonical in self._index.canonical_names(state).items()}
        return state[raws[name]]

    def _compare_ties(
        self, fitting: Mapping[str, Tensor], saved: SavedObject, findings: Findings
    ) -> None:
        """Two saved tensors cannot both go into one live tensor."""
        first: dict[object, str] = {}
        for name, tensor in fitting.items():
            if name in saved.composed:
                continue  # parts of two may lie in one memory, which gets the same bytes twice
            twin = first.setdefault(_place(name, tensor), name)
            if saved.record(twin).name != saved.record(name).name:
                findings.different.append(
                    f"{self._name}.{name}: live is tied to {twin}, checkpoint has two tensors"
                )

    def _extra_state(
        self, saved: SavedObject, name: str, dtensors: Mapping[str, Tensor], *, trusts: bool
    ) -> Any:
        """The value of an entry of the state dict that is no tensor, for user code to load."""
        tree = saved.field("extra")[name]
        value = saved.decode(tree, live=dtensors)
        if not trusts and _may_run_code(name, tree):
            code = saved.field("extra_codes", {}).get(name)
            require_own(code, value, f"{self._name}.{name}", where=saved.path)
        return value

    def _directly(
        self,
        saved: SavedObject,
        fitting: Mapping[str, Tensor],
        extras: Mapping[str, Node | None],
        give: Give,
    ) -> Changes:
        fallible = [
            Fallible(
                f"{self._name}.{name}",
                partial(_keep_extra_state, node.module),
                partial(self._set_extra_state, node.module, name, give),
            )
            for name, node in extras.items()
            if node is not None
        ]
        composed = ComposedLoad(saved)
        plain = {}
        for name, tensor in fitting.items():
            if name in saved.composed:
                composed.place(name, tensor)
            else:
                plain[name] = tensor
        return Changes(
            fallible=[*composed.fallible, *fallible],
            filled=[*self._filled(saved, plain), *composed.filled],
            sets=composed.sets,
        )

    def _filled(self, saved: SavedObject, fitting: Mapping[str, Tensor]) -> list[Filled]:
        found: dict[tuple[object, str], Filled] = {}  # tied names are filled once
        for name, tensor in fitting.items():
            record = saved.record(name)
            filled = Filled(f"{self._name}.{name}", tensor, record)
            found.setdefault((_place(name, tensor), record.name), filled)
        return [*found.values()]

    def _set_extra_state(self, module: nn.Module, name: str, give: Give) -> None:
        module.set_extra_state(give(name, self._live_dtensors()))

    def _by_load_state_dict(
        self,
        saved: SavedObject,
        fitting: Mapping[str, Tensor],
        extras: Collection[str],
        give: Give,
        *,
        strict: bool,
        kept: Collection[str],
    ) -> Fallible:
        """``kept`` are names whose live values stay; a strict load needs an entry for them too."""

        def load() -> None:
            now = self._module.state_dict() if kept else {}
            raw = {name: raw for raw, name in self._raw_names().items()}
            there = [raw[name] for name in kept if raw.get(name) in now]
            state = {raw.get(n, n): saved.owned(n, live=t) for n, t in fitting.items()}
            state.update((name, _kept(now[name])) for name in there)
            dtensors = self._live_dtensors() if extras else {}
            state.update((raw.get(name, name), give(name, dtensors)) for name in extras)
            self._module.load_state_dict(state, strict=strict)

        return Fallible(self._name, self._keep, load)

    def _raw_names(self) -> dict[str, str]:
        return self._index.canonical_names(self._module.state_dict())

    def _keep(self) -> Callable[[], None]:
        kept = {
            name: _kept(value) if isinstance(value, Tensor) else value
            for name, value in self._module.state_dict().items()
            if not isinstance(value, LAZY)
        }
        return lambda: _ignore(self._module.load_state_dict(kept, strict=False))


def fits(owner: str, name: str, live: Tensor, saved: SavedObject, findings: Findings) -> bool:
    """Whether the saved tensor ``name`` has the shape of ``live``; differences are findings."""
    if isinstance(live, LAZY) and name not in saved.composed:
        return True  # its own hook materialises it with the saved shape
    require_memory(f"{owner}.{name}", live)
    if name in saved.composed:
        saved.require(name)
        if why := saved.misfit(name, live):
            findings.different.append(f"{owner}.{name}: {why}")
        return not why
    record = saved.record(name)
    if is_composed(live):
        kind = described(take_apart(live, name)[0])
        findings.different.append(
            f"{owner}.{name}: checkpoint has a {record.dtype} tensor, live is {kind}"
        )
        return False
    shape, dtype = tuple(live.shape), DTYPE_NAMES.get(live.dtype, str(live.dtype))
    if shape == tuple(record.shape):
        saved.require(name, live)
        if dtype == record.dtype:
            return True
    findings.different.append(
        f"{owner}.{name}: checkpoint has {record.dtype}{list(record.shape)}, "
        f"live is {dtype}{list(shape)}"
    )
    return shape == tuple(record.shape)


def _settled(parameter: Tensor, trained_ids: frozenset[int]) -> bool:
    return id(parameter) in trained_ids or not parameter.requires_grad


def _is_extra(raw_name: str) -> bool:
    return raw_name.rpartition(".")[2] == EXTRA_STATE


def _may_run_code(name: str, tree: Json) -> bool:
    """Whether it is extra state in which something to unpickle, or to evaluate, has room."""
    return _is_extra(name) and not isinstance(tree, int | float | None)


def _address(tensor: Tensor) -> int:
    is_plain = not isinstance(tensor, LAZY) and not is_composed(tensor)
    return local_of(tensor).data_ptr() if is_plain else 0


def _place(name: str, tensor: Tensor) -> object:
    """Where a live tensor lies; of one without memory, its name."""
    address = _address(tensor)
    return (address, tensor.shape, tensor.stride()) if address else name


def _kept(value: Tensor) -> Tensor:
    live = value.detach()
    return live.clone() if is_dtensor(live) else live.to("cpu", copy=True)


def _ignore(_: object) -> None:
    return None


def _keep_extra_state(module: nn.Module) -> Callable[[], None]:
    return partial(module.set_extra_state, module.get_extra_state())


def module_tensors(saved: SavedObject) -> list[str]:
    """Names in a saved module's state dict, tied ones included, but for its extra state."""
    hidden = {*saved.field("extra_tensors", []), *saved.field("non_persistent", [])}
    return [name for name in saved.names() if name not in hidden]


def module_state_dict(saved: SavedObject) -> dict[str, Any]:
    """A state dict with canonical names, of owned CPU tensors; tied names share one tensor."""
    state: dict[str, Any] = {name: saved.owned(name) for name in module_tensors(saved)}
    trees: dict[str, Json] = saved.field("extra", {})
    return {**state, **{name: saved.decode(tree) for name, tree in trees.items()}}
