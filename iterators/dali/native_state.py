"""A dictionary with a digest around one of DALI's checkpoints, so that any damage is noticed.

DALI restores a damaged checkpoint wrongly and without an error in about one of four cases (21 of
91 single bit flips, DALI 2.4). So only a checkpoint whose digest matches is given to DALI.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

from iterators.errors import CorruptPositionError

State: TypeAlias = dict[str, Any]

STATE_VERSION = 1


def sealed(state: State) -> State:
    """``state`` with a digest of everything in it."""
    return {**state, "digest": _digest(state)}


def _digest(state: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


def intact(state: object) -> Mapping[str, Any]:
    """``state``, if it is unchanged since it was written; else ``CorruptPositionError``."""
    if not isinstance(state, Mapping):
        raise CorruptPositionError(f"DALI's state must be a dictionary, got {type(state).__name__}")
    version = state.get("version")
    if type(version) is int and version > STATE_VERSION:
        raise CorruptPositionError(
            f"DALI's state was written by a newer version of this library (format {version}; this "
            f"version reads up to {STATE_VERSION}): upgrade to resume from it"
        )
    content = {name: value for name, value in state.items() if name != "digest"}
    try:
        intact = version == STATE_VERSION and state.get("digest") == _digest(content)
    except (TypeError, ValueError):
        intact = False
    if not intact:
        raise CorruptPositionError("DALI's saved state is damaged: its digest does not match")
    return state
