"""Unchanged DALI pipelines, resumed through DALI's own checkpoints.

For pipelines of ``fn.readers.*`` and ``fn.random.*``. DALI restores a checkpoint of a different
shard or world size, or a damaged one, without an error. So each checkpoint is saved with a header
that tells what it belongs to, and a digest of both. The layout is fixed: same shards, same batch
size. DALI restores only while it builds a pipeline, so the adapter needs a function that builds the
iterator. A place is the number of samples served over all shards. Training thread only.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from iterators.dali.imports import __version__
from iterators.dali.native_facts import (
    Facts,
    fingerprint_of,
    note_shuffling,
    read_facts,
    require_at,
)
from iterators.dali.native_state import STATE_VERSION, State, intact, sealed
from iterators.errors import (
    CorruptPositionError,
    IterationStateError,
    NotResumableError,
    ResumeMismatchError,
    add_note,
)
from iterators.order.environment import rank_and_world
from iterators.order.position import Identity, Layout, Position
from iterators.protocol import Adapter, Delivery

logger = logging.getLogger(__name__)

MakeDALIIterator: TypeAlias = Callable[[bytes | None], Any]

BUILT_ITERATOR = (
    "DALI restores a checkpoint only while it builds a pipeline, never into one that exists: "
    "give NativeDALILoader a function make(checkpoint) that builds the iterator, its pipeline "
    "with enable_checkpointing=True and checkpoint=checkpoint"
)

_ADVICE = {
    "world": "DALI's checkpoints fit one layout: use the number of ranks of the interrupted run, "
    "and a position merged from all of them.",
    "rank": "Each rank restores its own state: keep the order of the ranks.",
    "shards": "DALI's checkpoints fit one layout: use the num_shards of the interrupted run.",
    "shard": "Each rank restores its own state: give it the shard_id of the interrupted run.",
    "batch": "DALI's random numbers depend on the index in the batch: use the batch size of the "
    "interrupted run.",
    "fingerprint": "Restore with the files the checkpoint was trained on.",
    "reader": "Give the reader the name it had in the interrupted run.",
    "settings": "Give the reader the arguments of the interrupted run: its order depends on them.",
    "operators": "Define the pipeline as in the interrupted run.",
}


class NativeDALILoader(Adapter):
    """A DALI iterator that ``make`` builds, resumed exactly at any batch, at the same layout.

    ::

        @pipeline_def(batch_size=64, num_threads=4, device_id=0, seed=7, enable_checkpointing=True)
        def pipeline():
            encoded, label = fn.readers.file(
                file_root=folder, name="Reader", pad_last_batch=True, shuffle_after_epoch=True
            )
            images = fn.decoders.image_random_crop(encoded, device="mixed")
            return fn.resize(images, size=[224, 224]), label

        def make(checkpoint):
            return DALIGenericIterator(
                pipeline(checkpoint=checkpoint),
                ["data", "label"],
                reader_name="Reader",
                last_batch_policy=LastBatchPolicy.PARTIAL,
            )

        train_loader = CFIterator(NativeDALILoader(make), cf_manager=manager)

    ``make(checkpoint)`` builds a DALI iterator for torch over one pipeline, from the bytes of a
    checkpoint, or from None for a fresh start. It is called once here, to read the properties of
    the iterator, and again for each restore and each pass that is taken back. The previous iterator
    is released first. The settings above are required, since all others lose or repeat samples.

    If a shard has no sample left for the last batch of an epoch, DALI serves an empty batch. It is
    replaced by one pad of weight 0, the last sample of the shard. An epoch that was left early is
    run to its end, with the batches dropped, before the next one starts. After an exception the
    next pass builds a new iterator from the state before it, so no sample is lost if the exception
    is caught.

    Arguments
        fingerprint: a name for the data. Default: a digest of the reader's files.
        seed: a mark of the run that must agree on a restore. The random numbers are DALI's.
        rank, world: number the processes whose positions are merged. Default: those of the process
            group.
    """

    def __init__(
        self,
        make: MakeDALIIterator,
        *,
        fingerprint: str | None = None,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if not callable(make):
            raise NotResumableError(f"{type(make).__name__} is already built. {BUILT_ITERATOR}")
        self._make = make
        self._rank, self._world = rank_and_world(rank, world)
        iterator = make(None)
        self._facts = facts = read_facts(iterator)
        note_shuffling(iterator, facts)
        if facts.shards == 1 and self._world > 1:
            logger.warning(
                "reader %r has num_shards=1 on %d ranks: each of them reads all samples",
                facts.reader,
                self._world,
            )
        name = fingerprint_of(iterator, facts) if fingerprint is None else fingerprint
        self._identity = Identity("dali-native-1", facts.epoch_size, name, seed)
        self._header = self._make_header()
        self._first: bytes = iterator.checkpoints()[0]
        self._live: _Live | None = _Live(iterator, facts, None)
        self._opened: NativeDeliveries | None = None

    @property
    def identity(self) -> Identity:
        """What must agree when a position is restored. ``n`` is the number of samples."""
        return self._identity

    @property
    def layout(self) -> Layout:
        """How the data is spread. Unlike with other loaders, it must not change."""
        versions = (("dali", __version__),)
        return Layout(self._world, self._facts.batch, versions=versions)

    @property
    def rank(self) -> int:
        """This process's rank among those whose positions are merged."""
        return self._rank

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every shard."""
        return self._facts.num_batches

    def batches_left(self, start: int) -> int:
        """Batches from place ``start`` to the end of an epoch."""
        return self._facts.num_batches - self._facts.batches(start)

    def open(self, *, epoch: int, start: int, state: Any = None) -> NativeDeliveries:
        """Continue at place ``start`` of ``epoch``.

        Uses the live iterator if it has not passed that place, else builds one from ``state``.
        """
        if self._opened is not None:
            self._opened.close()
        live = self._live_before((epoch, self._facts.batches(start)), state)
        self._opened = NativeDeliveries(live, self._facts, self._header)
        return self._opened

    def accept(self, position: Position) -> None:
        """Raise unless this rank's state in ``position`` is intact and of this layout."""
        if not position.states:
            if position.position:
                raise CorruptPositionError("the saved position lacks the states of DALI")
            return
        _require_equal("world", expected=len(position.states), found=self._world)
        header = intact(position.states[self._rank])
        for name in _ADVICE:
            _require_equal(name, expected=header[name], found=self._header[name])
        self._require_same_point(header, position)
        if header["dali"] != self._header["dali"]:
            logger.warning(
                "the checkpoint was written by DALI %s, this is DALI %s: DALI does not promise "
                "that checkpoints work across versions",
                header["dali"],
                self._header["dali"],
            )

    def close(self) -> None:
        """Release the iterator and its threads. The adapter can be opened again."""
        if self._opened is not None:
            self._opened.close()
        self._opened = self._live = None

    def _live_before(self, target: tuple[int, int], state: State | None) -> _Live:
        """An iterator at ``target`` (epoch, batches)."""
        if self._live is None or not self._live.can_reach(target, state):
            self._opened = self._live = None  # first: there may be memory for only one pipeline
            self._live = self._restored(state)
        self._live.run_to(*target)
        return self._live

    def _restored(self, state: State | None) -> _Live:
        checkpoint = self._first if state is None else base64.b64decode(state["checkpoint"])
        try:
            iterator = self._make(checkpoint)
        except RuntimeError as error:
            add_note(error, "while building the pipeline from a DALI checkpoint")
            raise
        self._require_same(iterator)
        return _Live(iterator, self._facts, state)

    def _require_same(self, iterator: Any) -> None:
        facts = read_facts(iterator)
        if facts != self._facts:
            raise NotResumableError(
                f"make(checkpoint) must build the same iterator each time: first {self._facts}, "
                f"now {facts}"
            )
        if not iterator._pipes[0].is_restored_from_checkpoint:
            raise NotResumableError(
                "make(checkpoint) built an iterator that starts from the beginning: pass "
                "checkpoint=checkpoint to its pipeline"
            )

    def _require_same_point(self, header: Mapping[str, Any], position: Position) -> None:
        """Check that the state and the place belong together.

        The state is that of the batch that ended at the place; at the start of an epoch it is
        that of the last batch of an earlier one.
        """
        epoch, place = header["epoch"], self._facts.place(header["batches"])
        same = (epoch, place) == (position.epoch, position.position)
        if not same and not (epoch < position.epoch and position.position == 0):
            raise CorruptPositionError(
                f"the saved position is at sample {position.position} of epoch {position.epoch}, "
                f"but DALI's state in it is at sample {place} of epoch {epoch}"
            )

    def _make_header(self) -> State:
        facts = self._facts
        return {
            "version": STATE_VERSION,
            "rank": self._rank,
            "world": self._world,
            "shard": facts.shard,
            "shards": facts.shards,
            "batch": facts.batch,
            "fingerprint": self._identity.fingerprint,
            "reader": facts.reader,
            "settings": facts.settings,
            "operators": facts.operators,
            "dali": __version__,
        }


class NativeDeliveries:
    """One pass over the rest of an epoch. The adapter keeps the iterator for the next pass."""

    def __init__(self, live: _Live, facts: Facts, header: State) -> None:
        self._live: _Live | None = live
        self._facts, self._header = facts, header

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        live = self._live
        if live is None or live.batches == self._facts.num_batches:
            raise StopIteration
        with live.moving():
            batch = live.fetch()
            live.state = self._state_after(live)
        data, weights = _with_weights(batch)
        return Delivery(data, self._facts.place(live.batches), weights=weights, state=live.state)

    def close(self) -> None:
        """Release the iterator."""
        self._live = None

    def _state_after(self, live: _Live) -> State:
        return sealed(
            {
                **self._header,
                "epoch": live.epoch,
                "batches": live.batches,
                "checkpoint": base64.b64encode(live.checkpoint()).decode(),
            }
        )


class _Live:
    """A built iterator and its place. ``state`` is that of the last delivery."""

    def __init__(self, iterator: Any, facts: Facts, state: State | None) -> None:
        self._iterator, self._facts, self.state = iterator, facts, state
        self._is_lost = False
        self.epoch: int = state["epoch"] if state else 0
        self.batches: int = state["batches"] if state else 0
        require_at(iterator, self.epoch * facts.num_batches + self.batches)

    def can_reach(self, target: tuple[int, int], state: State | None) -> bool:
        """Whether running forward from here gives the same as restoring ``state`` at ``target``."""
        ahead = (self.epoch, self.batches) <= target
        return ahead and self.state == state and not self._is_lost

    @contextmanager
    def moving(self) -> Iterator[None]:
        """An exception inside leaves DALI at an unknown place, from which it must not continue."""
        if self._is_lost:
            raise IterationStateError(
                "the DALI iterator has raised an exception: start a new loop, which builds a new "
                "iterator"
            )
        self._is_lost = True
        yield
        self._is_lost = False

    def fetch(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise IterationStateError(
                f"the iterator ended epoch {self.epoch} after {self.batches} of "
                f"{self._facts.num_batches} batches: does other code use it?"
            ) from None
        self.batches += 1
        return batch

    def checkpoint(self) -> bytes:
        blob: bytes = self._iterator.checkpoints()[0]
        return blob

    def run_to(self, epoch: int, batches: int) -> None:
        """Run forward and drop the batches: DALI can leave an epoch only at its end."""
        dropped = 0
        with self.moving():
            while self.epoch < epoch:
                dropped += self._drop_to(self._facts.num_batches)
                self._end_epoch()
            dropped += self._drop_to(batches)
        if dropped:
            logger.warning("loaded and dropped %d batches to reach epoch %d", dropped, epoch)

    def _drop_to(self, batches: int) -> int:
        dropped = batches - self.batches
        for _ in range(dropped):
            self.fetch()
        return dropped

    def _end_epoch(self) -> None:
        """Reset the iterator, unless a restored one with ``auto_reset`` has done so already."""
        if self._iterator._counter:
            self._iterator.reset()
        if self._iterator._counter:
            raise IterationStateError(
                "the iterator is not at the end of its epoch after "
                f"{self._facts.num_batches} batches: does other code use it?"
            )
        self.epoch, self.batches = self.epoch + 1, 0


def _with_weights(batch: Any) -> tuple[Any, NDArray[np.float32] | None]:
    """A batch and one weight per sample; an empty batch becomes one pad of weight 0."""
    (outputs,) = batch
    rows = {len(one) for one in outputs.values() if hasattr(one, "shape")}
    if len(rows) != 1:
        return batch, None
    (count,) = rows
    if count:
        return batch, np.ones(count, dtype=np.float32)
    padded = {name: _first_of_empty(tensor) for name, tensor in outputs.items()}
    return [padded], np.zeros(1, dtype=np.float32)


def _first_of_empty(tensor: Any) -> Any:
    """The first sample of a batch that DALI cut to size 0.

    DALI pads the batch and then returns a view of size 0, so the sample is still in its memory.
    """
    size = (1, *tensor.shape[1:])
    return tensor.as_strided(size, tensor.stride(), tensor.storage_offset()).clone()


def _require_equal(name: str, *, expected: object, found: object) -> None:
    if expected != found:
        raise ResumeMismatchError(name, expected=expected, found=found, advice=_ADVICE[name])
