"""A look at a checkpoint before the objects are made that it is loaded into."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkfreq.mirror.reader import MirrorReader
from checkfreq.mirror.settings import Mirror
from checkfreq.persist.lock import holder_of
from checkfreq.restore.apply import decode_positions
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.restorer import Restorer
from checkfreq.state.adapters.optimizer_tree import optimizer_tree

logger = logging.getLogger(__name__)

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Peek:
    """What a checkpoint says about the run and the objects that it was taken of.

    Attributes
        step: the boundaries passed.
        epochs: by the name of each iterator, the epoch it was in, from 0.
        shapes: by the name of each tracked object, the shapes of its tensors by their names. Of a
            module these are its parameters and buffers.
        param_groups: by the name of each tracked optimizer, the number of parameters of each group.
    """

    step: int
    epochs: Mapping[str, int]
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    param_groups: Mapping[str, tuple[int, ...]]


def peek(chk_dir: Path, mirror: Mirror | None, *, step: int | None, wait_s: float) -> Peek | None:
    """See `CFManager.peek`; ``wait_s`` bounds the wait for a killed run's worker."""
    _wait_for_worker(chk_dir, wait_s)
    remote = None if mirror is None else MirrorReader(mirror)
    found = Restorer(chk_dir, remote=remote).find(step, lambda one: _peek(one, str(chk_dir)))
    return None if found is None else found[1]


def _wait_for_worker(chk_dir: Path, wait_s: float) -> None:
    """Return once nobody writes: a worker that outlived its training process still commits."""
    deadline_s = time.monotonic() + wait_s
    is_first = True
    while (holder := holder_of(chk_dir)) not in (None, os.getpid()):
        if time.monotonic() > deadline_s:
            logger.warning("%s is still written to, by the run of process %s", chk_dir, holder)
            return
        if is_first:
            logger.info("%s: waiting for the run of process %s", chk_dir, holder)
            is_first = False
        time.sleep(_LOOK_S)


def _peek(found: FoundCheckpoint, path: str) -> Peek:
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    groups: dict[str, tuple[int, ...]] = {}
    positions: dict[str, dict[str, Any]] = {}
    for rank in sorted(found.manifest.ranks or {0}):
        for name in found.names(rank) & found.manifest.objects.keys() - shapes.keys():
            saved = found.saved(name, path=path, rank=rank)
            shapes[name] = {key: record.shape for key, record in saved.records.items()}
            tree = optimizer_tree(saved) if saved.json.get("kind") == "optimizer" else None
            if tree is not None:
                groups[name] = tuple(group.num_params for group in tree.groups)
        for name, position in decode_positions(found, rank, path).items():
            positions.setdefault(name, position)
    epochs = {name: one["epoch"] for name, one in positions.items() if "epoch" in one}
    return Peek(found.step, epochs, shapes, groups)
