"""``requires_grad`` of a module's parameters, and which of its submodules are in evaluation mode.

Both decide what training does, and a script may change them on its way (a block that is thawed, a
batch norm that is frozen). They are kept as the fewest names that stand for all: a name is that of
a parameter, or of a module with everything below it, or, with a dot at its end, of a module alone.

A restore sets them as they were. It is a finding if the script gives them other values than in the
first start of the run, since then somebody changed it. An evaluation stays one: what the script put
into evaluation mode, and was in training mode, keeps the modes that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from checkfreq.state.adapters.base import Findings
from checkfreq.state.names import Node
from checkfreq.state.saved import SavedObject
from checkfreq.types import Json

#: By flag, the names of what has it.
Record: TypeAlias = dict[str, list[str]]

_ROOT = "."
_SHOWN = 5


class Flags:
    """The flags of one module, and those that the script gave it in the first start of the run."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self._last: object = None
        self._record: Record = {}
        self._first = self._read(nodes)

    def record(self, nodes: tuple[Node, ...]) -> dict[str, Json]:
        """The flags as JSON, with the first ones if they were different."""
        now = self._read(nodes)
        return {**now} if now == self._first else {**now, "first": self._first}

    def _read(self, nodes: tuple[Node, ...]) -> Record:
        now = (
            nodes,
            [node.module.training for node in nodes],
            [
                parameter.requires_grad
                for node in nodes
                for parameter in node.module._parameters.values()
                if parameter is not None
            ],
        )
        if now != self._last:  # rarely
            self._last = now
            self._record = {
                "frozen": covering({n: not p.requires_grad for n, p in _parameters(nodes)}),
                "evaluating": covering({n: not m.training for n, m in _modules(nodes)}),
            }
        return self._record

    def prepare(
        self,
        nodes: tuple[Node, ...],
        saved: SavedObject,
        findings: Findings,
        *,
        known: Collection[str],
    ) -> list[Callable[[], None]]:
        """What sets the live flags as they are saved; it cannot fail.

        ``known``: names of the parameters that the checkpoint has. Added to ``findings`` are those
        that the script gives a value now that it did not give them in the first start.
        """
        flags = saved.json.get("flags")
        if flags is None:  # it was imported
            return []
        first = flags.get("first", flags)
        parameters = {name: one for name, one in _parameters(nodes) if name in known}
        frozen = {name: is_covered(name, flags["frozen"]) for name in parameters}
        thaw = {n: not frozen[n] for n, one in parameters.items() if one.requires_grad is frozen[n]}
        planned = {name: not is_covered(name, first["frozen"]) for name in parameters}
        _tell(findings, saved.name, "requires_grad", thaw, planned)
        sets = [partial(_set_requires_grad, parameters[name], one) for name, one in thaw.items()]
        modules = dict(_modules(nodes))
        still = {name: is_covered(name, flags["evaluating"]) for name in modules}
        if modules[_ROOT].training or still[_ROOT]:
            modes = {n: not still[n] for n, one in modules.items() if one.training is still[n]}
            planned = {name: not is_covered(name, first["evaluating"]) for name in modules}
            _tell(findings, saved.name, "training", modes, planned)
            sets += [partial(_set_mode, modules[name], one) for name, one in modes.items()]
        return [*sets, partial(self._go_on_from, first)]

    def _go_on_from(self, first: Record) -> None:
        self._first = {key: first[key] for key in ("frozen", "evaluating")}


def covering(flags: Mapping[str, bool]) -> list[str]:
    """The fewest names that stand for all that are True: each for what is below it too."""
    mixed = {above for name, flag in flags.items() if not flag for above in _from_above(name)}
    names = (name for name, flag in flags.items() if flag)
    first = (next(one for one in _from_above(name) if one not in mixed) for name in names)
    return [*dict.fromkeys(first)]


def is_covered(name: str, names: Collection[str]) -> bool:
    """Whether any of ``names`` stands for this one."""
    return any(above in names for above in _from_above(name))


def _from_above(name: str) -> Iterator[str]:
    """The names that may stand for ``name``: the root's, "", first, and at last its own."""
    yield ""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


def _parameters(nodes: tuple[Node, ...]) -> Iterator[tuple[str, Tensor]]:
    for node in nodes:
        for attribute, parameter in node.module._parameters.items():
            if parameter is not None:
                yield node.name(attribute), parameter


def _modules(nodes: tuple[Node, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Each module, without what wraps it, under its name with a dot at the end."""
    for node in nodes:
        yield node.canonical or _ROOT, node.module


def _tell(
    findings: Findings,
    name: str,
    flag: str,
    wanted: Mapping[str, bool],
    planned: Mapping[str, bool],
) -> None:
    """Say which flags the checkpoint changes that the script gave the same value at first."""
    for value in (True, False):
        places = covering(
            {one: wanted.get(one) is value and first is value for one, first in planned.items()}
        )
        shown = [f"{name}.{place}".rstrip(".") for place in places[:_SHOWN]]
        if len(places) > _SHOWN:
            shown.append(f"{len(places) - _SHOWN} more")
        if shown:
            findings.flags.append(f"{', '.join(shown)}: {flag} {not value} -> {value}")


def _set_requires_grad(parameter: Tensor, wanted: bool) -> None:
    takes_any = parameter.is_floating_point() or parameter.is_complex()
    if parameter.is_leaf and (takes_any or not wanted):
        parameter.requires_grad_(wanted)


def _set_mode(module: nn.Module, wanted: bool) -> None:
    module.training = wanted
