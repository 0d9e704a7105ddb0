"""``restore(keep=("scheduler.T_max", "optimizer.lr"))``: the script's values instead of the saved.

The live values are put into the saved JSON before it is compared and loaded, whichever way the
object loads it. An entry may be that of any param_group, or of a scheduler inside another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from checkfreq.errors import ConfigError, StateError
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import StateCollector
from checkfreq.state.saved import SavedObject
from checkfreq.types import Json


def entries_by_object(chk: CFCheckpoint, keep: Iterable[str]) -> dict[str, frozenset[str]]:
    """The entries to keep of each object. Raises ConfigError for a name that is no entry's."""
    found: dict[str, set[str]] = {}
    owners = [name for name, a in chk.adapters.items() if a.kind in ("optimizer", "object")]
    for name in (keep,) if isinstance(keep, str) else keep:
        owner, _, entry = name.partition(".")
        if owner not in owners or not entry:
            raise ConfigError(
                "restore(keep=...): expected names such as 'optimizer.lr' or 'scheduler.T_max', "
                f"which begin with one of: {', '.join(owners) or 'none is tracked'}; found "
                f"{name!r}. A whole object is left as it is by exclude=..."
            )
        found.setdefault(owner, set()).add(entry)
    return {owner: frozenset(entries) for owner, entries in found.items()}


def put_live_values(saved: SavedObject, live: Any, entries: frozenset[str]) -> None:
    """Have the live object's values of ``entries`` stand in ``saved``.

    Raises ConfigError if it has no such entry, or one that is no plain value.
    """
    keeping = _Keeping(saved.name, entries)
    if isinstance(live, Optimizer):
        saved.json = keeping.in_optimizer(saved.json, live)
    else:
        tree = copy.deepcopy(saved.json.get("tree"))
        saved.json = {**saved.json, "tree": keeping.within(tree, live.state_dict())}
    if missing := sorted(entries - keeping.done):
        raise ConfigError(
            f"restore(keep=...): {', '.join(f'{saved.name}.{one}' for one in missing)} is not in "
            f"the checkpoint, or not in the live object; expected some of "
            f"{', '.join(f'{saved.name}.{one}' for one in sorted(keeping.seen)) or 'none'}"
        )
    saved.kept = entries


class _Keeping:
    """Replaces entries of one object: ``done`` of ``seen``, which are all that there are."""

    def __init__(self, name: str, entries: frozenset[str]) -> None:
        self._name, self._entries = name, entries
        #: In param_groups, where a live tensor is filled with the saved number.
        self._takes_numbers = False
        self.seen: set[str] = set()
        self.done: set[str] = set()

    def in_optimizer(self, json: Mapping[str, Json], live: Optimizer) -> dict[str, Json]:
        """The JSON of an optimizer, in either of its forms."""
        if "state_dict" in json:
            tree = copy.deepcopy(json["state_dict"])
            self._takes_numbers = isinstance(tree, dict) and "param_groups" in tree
            if self._takes_numbers:
                tree["param_groups"] = self.within(tree["param_groups"], live.param_groups)
            else:  # a form of its own
                tree = self.within(tree, live.state_dict())
            return {**json, "state_dict": tree}
        self._takes_numbers = True
        groups = copy.deepcopy(json["groups"])
        for group, values in zip(groups, live.param_groups, strict=False):
            group["values"] = self.within(group["values"], values)
        return {**json, "groups": groups}

    def within(self, node: Json, live: Any) -> Json:
        """``node``, with the live values of the entries wherever there is one of that name."""
        if isinstance(node, list) and isinstance(live, list | tuple):
            return [self.within(*pair) for pair in zip(node, live, strict=False)]
        if not isinstance(node, dict) or not isinstance(live, Mapping):
            return node
        if isinstance(pairs := node.get("$dict"), list):
            return {"$dict": [[key, self._entry(key, one, live)] for key, one in pairs]}
        if next(iter(node), "").startswith("$"):
            return node
        return {key: self._entry(key, one, live) for key, one in node.items()}

    def _entry(self, key: Json, node: Json, live: Mapping[Any, Any]) -> Json:
        if not isinstance(key, str) or key not in live:
            return node
        self.seen.add(key)
        if key not in self._entries:
            return self.within(node, live[key])
        self.done.add(key)
        value = live[key]
        collector = StateCollector()
        collector.start(self._name)
        path = f"{self._name}.{key}"
        if isinstance(value, Tensor) and self._takes_numbers:
            value = value.tolist()
        try:
            encoded = collector.encode(value, path)
        except StateError as error:
            raise ConfigError(f"restore(keep=...): {error}") from error
        if collector.refs:
            raise ConfigError(f"restore(keep=...): {path} holds tensors; expected plain values")
        return encoded
