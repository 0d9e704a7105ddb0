"""Conformance tests for resumable iterators, for users to run over their own datasets.

``check_resumable`` walks an iterator, records its state before each batch, restores a fresh one
from *every* recorded state, and compares the rest exactly: which samples, and their bits.
``FakeManager`` stands in for a checkpoint manager and writes down what it was told.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np

from iterators.cf_iterator import CFIterator
from iterators.protocol import PositionSource

MakeIterator: TypeAlias = Callable[[], CFIterator]


@dataclass(frozen=True, slots=True)
class Served:
    """One batch as it was handed out. ``state`` is the JSON text of the position before it."""

    state: str
    epoch: int
    batch: int
    ids: tuple[int, ...] | None
    digest: str


def walk(iterator: CFIterator, *, epochs: int) -> list[Served]:
    """Serve everything up to ``epochs`` epochs in all, and note each batch."""
    served = []
    for epoch in iterator.epochs(epochs):
        for data in iterator:
            ids = iterator.last_ids
            served.append(
                Served(
                    json.dumps(iterator.state_dict()),
                    epoch,
                    iterator.batch,
                    None if ids is None else tuple(ids.tolist()),
                    digest(data),
                )
            )
    return served


def check_resumable(
    make: MakeIterator, *, make_resumed: MakeIterator | None = None, epochs: int = 2
) -> int:
    """Restore from every state of a walk over ``epochs`` epochs and compare the rest exactly.

    ``make`` builds a fresh iterator; ``make_resumed`` (default: the same) the one that is
    restored, for another number of workers, say; its batches must have the same size. Neither
    may have a manager. Returns how many states were tried; ``AssertionError`` names the first
    one from which the rest differs. Loads every batch about ``epochs * len / 2`` times.
    """
    whole = walk(make(), epochs=epochs)
    for start, recorded in enumerate(whole):
        _compare(_resumed(make_resumed or make, recorded.state, epochs), whole[start:])
    last = make()
    walk(last, epochs=epochs)
    _compare(_resumed(make_resumed or make, json.dumps(last.state_dict()), epochs), [])
    return len(whole) + 1


def _resumed(make: MakeIterator, state: str, epochs: int) -> list[Served]:
    iterator = make()
    iterator.load_state_dict(json.loads(state))
    return walk(iterator, epochs=epochs)


def _compare(resumed: list[Served], expected: list[Served]) -> None:
    assert len(resumed) == len(expected), f"{len(resumed)} batches served, not {len(expected)}"
    for found, wanted in zip(resumed, expected, strict=True):
        where = f"epoch {wanted.epoch}, batch {wanted.batch}"
        place = (found.epoch, found.batch)
        assert place == (wanted.epoch, wanted.batch), f"{where}: served as {place}"
        assert found.ids == wanted.ids, f"{where}: samples {found.ids}, not {wanted.ids}"
        assert found.digest == wanted.digest, f"{where}: same samples, other content"


def digest(data: object) -> str:
    """A digest of a batch, bit for bit: tensors, arrays, containers, dataclasses, plain values.

    Values that only compare by identity should be turned into one of those first.
    """
    state = blake2b(digest_size=16)
    _feed(state.update, data)
    return state.hexdigest()


def _feed(update: Callable[[bytes], None], data: Any) -> None:
    if isinstance(data, (np.ndarray, np.generic)):
        update(f"array {data.dtype} {data.shape}".encode())
        update(data.tobytes())
        return
    if hasattr(data, "untyped_storage"):
        update(f"tensor {data.dtype} {tuple(data.shape)}".encode())
        update(_bytes_of_tensor(data))
        return
    update(f"{type(data).__name__}(".encode())
    for part in _parts(data):
        _feed(update, part)
    update(b")")


def _parts(data: Any) -> list[Any]:
    """What a value is made of; a leaf feeds its text."""
    if isinstance(data, Mapping):
        return [part for item in data.items() for part in item]
    if isinstance(data, (list, tuple)):
        return list(data)
    if is_dataclass(data) and not isinstance(data, type):
        return [getattr(data, one.name) for one in fields(data)]
    return [] if data is None else [np.frombuffer(repr(data).encode(), dtype=np.uint8)]


def _bytes_of_tensor(tensor: Any) -> bytes:
    import torch  # torch's data only: the module itself must import without it

    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).view(torch.uint8)
    content: bytes = flat.numpy().tobytes()
    return content


class FakeManager:
    """A manager that saves nothing but the positions, in memory.

    ``events`` lists what it was told: "step", "end_epoch", "first" and so on. ``positions``
    holds what each boundary would have saved, by name. ``weight_update`` counts an attempt.
    Set ``stopped`` to let the next boundary stop the run.
    """

    def __init__(self, *, restored: Mapping[str, dict[str, Any]] | None = None) -> None:
        self.update_attempts = 0
        self.stopped = False
        self.events: list[str] = []
        self.positions: list[dict[str, dict[str, Any]]] = []
        self._restored = dict(restored or {})
        self._sources: dict[str, PositionSource] = {}

    def register_position(self, name: str, source: PositionSource, /) -> None:
        """Remember ``source``; apply a position restored earlier."""
        self._sources[name] = source
        if name in self._restored:
            source.load_state_dict(self._restored.pop(name))

    def register_pacing(self, *, chk_freq: int | None, dynamic: bool | None) -> None:
        """Note the wish."""
        self.events.append(f"pacing {chk_freq} {dynamic}")

    def weight_update(self) -> None:
        """Pretend to update the weights."""
        self.update_attempts += 1

    def step(self) -> None:
        """Note the boundary and what it would save."""
        self._boundary("step")

    def end_epoch(self) -> None:
        """Note the boundary and what it would save."""
        self._boundary("end_epoch")

    def before_first_batch(self) -> None:
        """Note the moment."""
        self.events.append("first")

    def close(self) -> None:
        """End cleanly: every iterator passes what is pending."""
        for source in self._sources.values():
            source.finish()

    def _boundary(self, name: str) -> None:
        self.events.append(name)
        saved = {name: source.state_dict() for name, source in self._sources.items()}
        self.positions.append(copy.deepcopy(saved))
