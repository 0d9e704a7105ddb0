"""The conformance tests of `iterators.testing`, and the manager that stands in for a real one."""

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
    """Drop all ranks at random points, go on at a random layout, and compare every sample.

    Each life has a world from ``worlds``, a batch size per rank from ``batches``, and serves 1 to
    ``most_served`` global batches; ``seed`` decides. What is compared, and the other arguments:
    ``check_lives``. Returns the number of restarts. A run of ``n`` samples has about
    ``epochs * n / g`` lives, ``g`` being what one serves on average.
    """
    lives = _random_lives(random.Random(seed), worlds, batches, most_served)
    return check_lives(make, lives, epochs=epochs, samples_of=samples_of)


def check_lives(
    make: MakeRank, lives: Iterable[Life], *, epochs: int = 2, samples_of: SamplesOf = list
) -> int:
    """Serve ``epochs`` epochs in ``lives``; every sample must be that of an undisturbed run.

    The undisturbed run is ``make(0, 1, 1)``. At each end of a life the positions of all ranks are
    merged, and every rank of the next one loads the result. Checked are

    - each sample handed out, also one that will be served again: the id and the bits of the
      undisturbed run at its place in the global order (pads, of weight 0, left out);
    - each merged position: the place behind the last boundary, and the ledger of all before it;
    - each epoch: under tail "short" all its places were served; under "drop" which ones are left
      unserved depends on the layouts, so: all but fewer than the largest global batch, without
      a gap or a repetition from the first on.

    ``samples_of`` splits a batch; the default fits ``collate_fn=list``. The iterators need ids
    and no manager; all ranks live in this process. Returns the number of restarts;
    ``AssertionError`` names the first difference. Builds ``world`` iterators a life, loads every
    epoch twice and up to a global batch more for each kill.
    """
    run = Run(make, epochs, samples_of)
    for number, life in enumerate(lives):
        if run.live(life):
            run.require_whole()
            return number
    raise AssertionError(f"the lives end before the {epochs} epochs do")


def _random_lives(
    rng: random.Random, worlds: Sequence[int], batches: Sequence[int], most_served: int
) -> Iterator[Life]:
    while True:
        served = rng.randint(1, most_served)
        yield Life(rng.choice(worlds), rng.choice(batches), served, rng.choice(list(End)))


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
