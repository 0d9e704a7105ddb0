"""The conformance tests of `iterators.testing`, and a fake manager."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from iterators.cf_iterator import CFIterator
from iterators.protocol import PositionSource
from iterators.testing.digest import digest
from iterators.testing.lives import End, Life, MakeRank, Run, SamplesOf

MakeIterator: TypeAlias = Callable[[], CFIterator]


@dataclass(frozen=True, slots=True)
class Served:
    """One batch as it was handed out.

    ``state`` is the position before the batch, as JSON text; ``ids`` are its samples, None if the
    loader does not know them; ``digest`` is that of its content.
    """

    state: str
    epoch: int
    batch: int
    ids: tuple[int, ...] | None
    digest: str


def walk(iterator: CFIterator, *, epochs: int) -> list[Served]:
    """Serve the batches up to ``epochs`` epochs in all, and return a record of each."""
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
    """Restore from every state of a walk over ``epochs`` epochs, and compare the rest exactly.

    ``make`` builds a fresh iterator. ``make_resumed`` (default: ``make``) builds the one that is
    restored, for example with a different number of workers; its batches must have the same size.
    Neither may have a manager.

    Returns the number of states. Raises ``AssertionError`` with the first batch that differs. Every
    batch is loaded about ``epochs * len / 2`` times, so use a small dataset.
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
        assert found.digest == wanted.digest, f"{where}: same samples, different content"


def check_elastic(
    make: MakeRank,
    *,
    epochs: int = 2,
    seed: int = 0,
    worlds: Sequence[int] = (1, 2, 3, 5),
    batches: Sequence[int] = (1, 4, 7),
    most_served: int = 9,
    samples_of: SamplesOf = list,
) -> int:
    """End all ranks at random points, continue at a random layout, and compare every sample.

    Each life of the run has a world size from ``worlds`` and a batch size per rank from
    ``batches``, and serves 1 to ``most_served`` global batches; ``seed`` makes the choice
    repeatable. See ``check_lives`` for the other arguments and for what is compared.

    Returns the number of restarts. A run over ``n`` samples has about ``epochs * n / g`` lives,
    where ``g`` is the number of samples that a life serves on average.
    """
    lives = _random_lives(random.Random(seed), worlds, batches, most_served)
    return check_lives(make, lives, epochs=epochs, samples_of=samples_of)


def check_lives(
    make: MakeRank, lives: Iterable[Life], *, epochs: int = 2, samples_of: SamplesOf = list
) -> int:
    """Serve ``epochs`` epochs in several ``lives``, and compare with an undisturbed run.

    ::

        def make(rank, world, batch):
            loader = ResumableDataLoader(
                dataset, batch, shuffle=True, seed=1, rank=rank, world=world, collate_fn=list
            )
            return CFIterator(loader)

        check_lives(make, [Life(world=2, batch=4, served=3), Life(world=3, batch=2)], epochs=1)

    The undisturbed run is ``make(0, 1, 1)``. At the end of each life the positions of all ranks are
    merged, and every rank of the next life loads the result. These are checked:

    - each sample handed out, including those that will be served again, has the id and the bits
      that the undisturbed run has at its place in the global order (pads of weight 0 left out);
    - each merged position has the place behind the last boundary and the ledger of all before it;
    - each epoch was served completely with ``tail="short"``. With "drop", the places that are not
      served depend on the layouts: they are fewer than the largest global batch, all at the end.

    ``samples_of`` splits a batch into its samples; the default fits ``collate_fn=list``. The
    iterators must know their sample ids, and have no manager. All ranks run in this process.

    Returns the number of restarts. Raises ``AssertionError`` with the first difference. Builds
    ``world`` iterators per life, and loads every epoch twice, plus up to a global batch per kill.
    """
    run = Run(make, epochs, samples_of)
    for number, life in enumerate(lives):
        if run.live(life):
            run.require_whole()
            return number
    raise AssertionError(f"the lives end before {epochs} epochs were served")


def _random_lives(
    rng: random.Random, worlds: Sequence[int], batches: Sequence[int], most_served: int
) -> Iterator[Life]:
    while True:
        served = rng.randint(1, most_served)
        yield Life(rng.choice(worlds), rng.choice(batches), served, rng.choice(list(End)))


class FakeManager:
    """A manager that keeps the positions in memory and saves nothing else.

    ``events`` lists the calls: "step", "end_epoch", "first" (``before_first_batch``), "pacing ...".
    ``positions`` holds, for each boundary, what would have been saved, by name of the iterator.
    Call ``weight_update`` where a loop would call ``optimizer.step()``. Set ``stopped`` to make the
    next boundary stop the run. ``restored`` maps names to positions to load at registration.
    """

    def __init__(self, *, restored: Mapping[str, dict[str, Any]] | None = None) -> None:
        self.update_attempts = 0
        self.stopped = False
        self.events: list[str] = []
        self.positions: list[dict[str, dict[str, Any]]] = []
        self._restored = dict(restored or {})
        self._sources: dict[str, PositionSource] = {}

    def register_position(self, name: str, source: PositionSource, /) -> None:
        """Remember ``source``, and load its position from ``restored`` if there is one."""
        self._sources[name] = source
        if name in self._restored:
            source.load_state_dict(self._restored.pop(name))

    def register_pacing(self, *, chk_freq: int | None, dynamic: bool | None) -> None:
        """Record the request."""
        self.events.append(f"pacing {chk_freq} {dynamic}")

    def weight_update(self) -> None:
        """Count an attempted weight update."""
        self.update_attempts += 1

    def step(self) -> None:
        """Record the boundary and the positions that it would save."""
        self._boundary("step")

    def end_epoch(self) -> None:
        """Record the boundary and the positions that it would save."""
        self._boundary("end_epoch")

    def before_first_batch(self) -> None:
        """Record the call."""
        self.events.append("first")

    def close(self) -> None:
        """End the run cleanly: every iterator passes its pending boundary."""
        for source in self._sources.values():
            source.finish()

    def _boundary(self, name: str) -> None:
        self.events.append(name)
        saved = {name: source.state_dict() for name, source in self._sources.items()}
        self.positions.append(copy.deepcopy(saved))
