"""What was read at one boundary: all of it, and the part of it that this rank writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkfreq.state.collector import TensorRef
from checkfreq.state.dtensors import Cut
from checkfreq.types import Json

#: Keys of ``objects`` that are not tracked names.
RNG = "rng"
POSITIONS = "$positions"
GRADIENTS = "$gradients"


@dataclass(frozen=True, slots=True)
class Everything:
    """The whole state as one rank sees it, object after object.

    ``spans[name]`` are the refs of an object; ``cuts`` say of which DTensor a ref is the local
    tensor. ``own_objects`` and ``own_tensors`` (object, key) differ from rank to rank.
    """

    refs: list[TensorRef]
    spans: Mapping[str, tuple[int, int]]
    objects: dict[str, Json]
    aliases: dict[str, dict[str, str]]
    cuts: dict[int, Cut] = field(default_factory=dict)
    own_objects: frozenset[str] = frozenset()
    own_tensors: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class CapturedState:
    """What this rank writes of the state as of one boundary.

    ``tensors`` are live, unique per object; settled ones hold still until the next weight
    update, the others must be copied before the training goes on. ``objects`` is everything
    else, as JSON by tracked name; ``aliases`` maps, per file, a tied name to the key that
    holds its bytes. ``own``: JSON of what differs from rank to rank; None on one rank.
    ``whole`` is what this is a part of, for ``structure``; None on one rank.
    ``is_split``: replicated tensors are divided among the ranks.
    """

    tensors: list[TensorRef]
    objects: dict[str, Json]
    aliases: dict[str, dict[str, str]]
    own: dict[str, Json] | None = None
    whole: Everything | None = None
    is_split: bool = False
