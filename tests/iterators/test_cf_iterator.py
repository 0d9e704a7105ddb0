"""``CFIterator``: when boundaries are passed, what a position covers, and what loops mean."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from iterators import (
    CFIterator,
    IterationStateError,
    Ledger,
    NotResumableError,
    ResumableDataLoader,
    ResumeMismatchError,
)
from iterators.testing import FakeManager, check_resumable
from tests.iterators.datasets import Plain
from tests.iterators.streams import Opaque


def loader(n: int = 10, batch: int = 4, **settings: Any) -> ResumableDataLoader:
    return ResumableDataLoader(Plain(n), batch, **settings)


def managed(
    manager: FakeManager, n: int = 10, batch: int = 4, num_workers: int = 0, **options: Any
) -> CFIterator:
    return CFIterator(loader(n, batch, num_workers=num_workers), cf_manager=manager, **options)


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


def places(manager: FakeManager, name: str = "train") -> list[tuple[int, int, int]]:
    saved = [position[name] for position in manager.positions]
    return [(one["epoch"], one["position"], one["step"]) for one in saved]


def place(iterator: CFIterator) -> tuple[int, int, int]:
    state = iterator.state_dict()
    return state["epoch"], state["position"], state["step"]


def take_all(iterator: CFIterator) -> list[list[int]]:
    return [batch.tolist() for batch in iterator]


# Boundaries


#: The options; for each epoch the updates after each batch of two samples, and in the tail; where
#: boundaries are passed.
BOUNDARIES: dict[str, tuple[dict[str, Any], list[list[int]], list[tuple[int, int, int]]]] = {
    "several updates for one batch are one boundary": ({}, [[2, 2, 0]], [(0, 2, 1), (1, 0, 2)]),
    "an update in the tail belongs to the epoch": (
        {},
        [[0, 1, 0, 1]] * 2,
        [(0, 4, 1), (1, 0, 2), (1, 4, 3), (2, 0, 4)],
    ),
    "gradients carried over the end of an epoch move its boundary": (
        {},
        [[0, 1, 0, 0], [1, 0, 1, 0]],
        [(0, 4, 1), (1, 2, 2), (2, 0, 3)],
    ),
    "an epoch may end after some batches": (
        {"batches_per_epoch": 2},
        [[1, 1, 0]] * 2,
        [(0, 2, 1), (1, 0, 2), (1, 2, 3), (2, 0, 4)],
    ),
}


@pytest.mark.parametrize("case", BOUNDARIES)
def test_where_boundaries_are_passed(case: str) -> None:
    options, updates, expected = BOUNDARIES[case]
    manager = FakeManager()
    size = 2 * len(updates[0]) - 2 if "batches_per_epoch" not in options else 20
    iterator = managed(manager, n=size, batch=2, **options)
    for epoch in iterator.epochs(len(updates)):
        *after_batches, in_tail = updates[epoch]
        for times, _ in zip(after_batches, iterator, strict=True):
            manager.update_attempts += times
        manager.update_attempts += in_tail
    assert places(manager) == expected


def test_updates_before_the_first_batch_do_not_count_for_it(manager: FakeManager) -> None:
    iterator = managed(manager)
    manager.weight_update()
    batches = iter(iterator)
    next(batches)
    next(batches)
    assert manager.events == ["first"]


STEPS, LOOP = CFIterator.steps, lambda iterator, _: iter(iterator)


@pytest.mark.parametrize(
    ("options", "loop", "taken", "updates", "goes_on_at"),
    [
        ({}, LOOP, 1, 0, (0, 0)),
        ({}, LOOP, 2, 1, (1, 0)),
        ({}, STEPS, 2, 1, (0, 2)),
        ({"accumulate": 3}, LOOP, 3, 0, (0, 0)),
        ({"accumulate": 3}, LOOP, 2, 1, (0, 0)),
        ({"accumulate": 3}, LOOP, 3, 1, (1, 0)),
        ({"accumulate": 3}, STEPS, 4, 0, (0, 4)),
        ({"cf_manager": None}, LOOP, 1, 0, (1, 0)),
        ({"cf_manager": None}, STEPS, 1, 0, (0, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_loop_that_is_left_goes_on_or_is_over_or_was_only_a_look(
    options: dict[str, Any], loop: Any, taken: int, updates: int, goes_on_at: tuple[int, int]
) -> None:
    manager = FakeManager()
    options = {"n": 24, "cf_manager": manager, **options}
    iterator = CFIterator(loader(options.pop("n"), 4), **options)
    for _ in islice(loop(iterator, 9), taken):
        pass
    for _ in range(updates):
        manager.weight_update()
    next(loop(iterator, 9))
    assert (iterator.epoch, iterator.batch) == goes_on_at


@pytest.mark.parametrize(
    "make",
    [
        lambda: loader(22),
        lambda: DataLoader(Opaque([22]), batch_size=4),
        lambda: [range(start, start + 4) for start in range(6)],
    ],
)
@pytest.mark.parametrize(("most", "served"), [(4, 4), (9, 6)])
def test_an_epoch_ends_after_so_many_batches_at_every_restart(
    make: Callable[[], Any], most: int, served: int
) -> None:
    def cut() -> CFIterator:
        return CFIterator(make(), exact=False, batches_per_epoch=most, seed=3)

    assert check_resumable(cut) == 2 * served + 1
    iterator = cut()
    for _ in iterator.epochs(2):
        last = [iterator.is_last_batch for _ in iterator]
        assert last == [False] * (served - 1) + [True]
    assert iterator.epoch == 2


def test_generators_are_offered_again_until_the_first_boundary(manager: FakeManager) -> None:
    iterator = managed(manager)
    next(iter(iterator))  # a look
    for _ in iterator.epochs(2):
        for _ in iterator:
            manager.weight_update()
    assert manager.events.count("first") == 2
    assert manager.events[:2] == ["first", "first"]


# Leaving early


@pytest.mark.parametrize("end", [take_all, CFIterator.reset])
def test_a_second_loop_or_a_reset_ends_the_one_still_open(end: Any) -> None:
    iterator = CFIterator(loader())
    held = iter(iterator)
    next(held)
    end(iterator)
    assert list(held) == []


def test_reset_ends_the_pass_but_leaves_the_boundary_for_after_the_tail() -> None:
    manager = FakeManager()
    iterator = managed(manager)
    for _ in iterator.epochs(1):
        for _ in iterator:
            manager.weight_update()
        iterator.reset()
        assert "end_epoch" not in manager.events
    assert manager.events[-1] == "end_epoch"
    take_all(iterator)
    take_all(iterator)
    assert (iterator.epoch, place(iterator)) == (2, (1, 0, 3))


# Ending


@pytest.mark.parametrize(("last", "place"), [(0, (0, 4, 1)), (2, (1, 0, 3)), (None, (1, 0, 3))])
def test_a_close_keeps_the_rest_of_an_epoch_and_passes_the_last_boundary_of_a_served_one(
    last: int | None, place: tuple[int, int, int]
) -> None:
    manager = FakeManager()
    iterator = managed(manager)
    for _ in iterator:
        manager.weight_update()
        if iterator.batch == last:
            break
    manager.close()
    manager.close()
    assert places(manager)[-1] == place
    assert len(manager.positions) == place[2]


def test_finish_in_the_last_tail_does_not_end_an_epoch_twice(manager: FakeManager) -> None:
    iterator = managed(manager)
    for _ in iterator.epochs(2):
        for _ in iterator:
            manager.weight_update()
        manager.close()
    assert [one[0] for one in places(manager)] == [0, 0, 1, 1, 1, 2]


def test_a_second_pass_that_could_train_in_one_turn_is_an_error(manager: FakeManager) -> None:
    iterator = managed(manager)
    for _ in iterator.epochs(1):
        for _ in iterator:
            manager.weight_update()
        for loop in (iter, CFIterator.enumerate):
            with pytest.raises(IterationStateError, match=r"second loop within epoch 0 .*evaluate"):
                loop(iterator)
    assert place(iterator) == (1, 0, 3)


@pytest.mark.parametrize(("mode", "workers"), [(torch.no_grad, 0), (torch.inference_mode, 1)])
def test_a_second_pass_without_gradients_serves_the_epoch_and_moves_nothing(
    mode: Any, workers: int
) -> None:
    manager = FakeManager()
    iterator = managed(manager, num_workers=workers, audit=True)
    whole = take_all(CFIterator(loader()))
    torch.manual_seed(1)
    trained = []
    for _ in iterator.epochs(2):
        with mode():  # costs no epoch
            assert take_all(iterator) == whole
        for batch in iterator:
            trained.append(batch.tolist())
            manager.weight_update()
            last, at = iterator.last_ids, place(iterator)
            with mode():  # nested in the loop that trains
                assert take_all(iterator) == whole
            assert iterator.last_ids is last
            assert place(iterator) == at
        with mode():
            assert [(i, one.tolist()) for i, one in iterator.enumerate(1)] == [*enumerate(whole, 1)]
    drawn = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(2))
    assert trained == whole * 2
    assert places(manager) == [(0, 4, 1), (0, 8, 2), (1, 0, 3), (1, 4, 4), (1, 8, 5), (2, 0, 6)]
    assert iterator.last_report is not None
    assert iterator.last_report.exact


@pytest.mark.parametrize("loop", [CFIterator.__iter__, lambda one: one.steps(6), None])
def test_outside_epochs_a_pass_without_gradients_moves_nothing_unless_it_trains(loop: Any) -> None:
    manager = FakeManager()
    iterator = managed(manager)
    if loop is None:
        with torch.no_grad():
            for _ in chain(iterator, iterator):
                manager.weight_update()
    for _ in range(2) if loop else ():
        for _ in loop(iterator):
            manager.weight_update()
            with torch.no_grad():
                assert len(take_all(iterator)) == 3
        with torch.no_grad():
            assert len(take_all(iterator)) == 3
    manager.close()
    assert places(manager)[-1] == (2, 0, 6)


def test_a_second_pass_after_the_rest_of_a_restored_epoch_serves_all_of_it() -> None:
    def loop(manager: FakeManager) -> list[int]:
        iterator, measured = managed(manager), []
        for _ in iterator.epochs(2):
            for i, _ in iterator.enumerate():
                if i == 1:  # the last batch is for no update
                    manager.weight_update()
            with torch.no_grad():
                measured.append(len(take_all(iterator)))
        return measured

    whole = FakeManager()
    assert loop(whole) == [3, 3]
    assert loop(FakeManager(restored=whole.positions[0])) == [3, 3]


def test_an_evaluation_shows_its_own_samples_and_may_be_left_early() -> None:
    iterator = CFIterator(loader(persistent_workers=True, num_workers=1))
    for batch in iterator:
        for one in iterator.evaluate():
            assert iterator.last_ids is not None
            assert one.tolist() == iterator.last_ids.tolist() == [0, 1, 2, 3]
            break
        assert iterator.last_ids.tolist() == batch.tolist()


# Steps


# Restoring


def test_loading_after_batches_were_used_is_an_error_but_not_after_a_look() -> None:
    iterator = CFIterator(loader())
    for _ in iterator:
        state = iterator.state_dict()
        with pytest.raises(IterationStateError, match="already served batches"):
            iterator.load_state_dict(state)
    with pytest.raises(IterationStateError, match="already served batches"):
        iterator.load_state_dict(state)
    looked = managed(FakeManager())
    next(iter(looked))
    looked.load_state_dict(state)
    assert (looked.batch, take_all(looked)) == (2, [[8, 9]])


def test_epochs_yields_nothing_when_the_total_is_reached_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = CFIterator(loader()), CFIterator(loader())
    for _ in first.epochs(2):
        take_all(first)
    second.load_state_dict(first.state_dict())
    with caplog.at_level(logging.INFO, logger="iterators"):
        assert list(second.epochs(3)) == [2]
        assert "were served before" not in caplog.text
        assert list(second.epochs(3)) == []
        assert "all 3 epochs were served before" in caplog.text


def test_a_different_layout_and_tail_are_accepted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = CFIterator(loader(12, 4))
    take_all(first)
    second = CFIterator(loader(12, 2, tail="drop", num_workers=1))
    with caplog.at_level(logging.INFO, logger="iterators"):
        second.load_state_dict(first.state_dict())
    assert "a different layout" in caplog.text
    assert "tail policy is 'drop'; the position was saved with 'short'" in caplog.text
    assert take_all(second) == [[8, 9], [10, 11]]


# Several iterators


def test_a_validation_loop_left_early_starts_the_next_epoch_also_after_a_clean_close() -> None:
    manager = FakeManager()
    valid = managed(manager, name="valid", marks_steps=False)
    next(iter(valid))
    assert place(valid) == (1, 0, 1)
    next(iter(valid))
    assert valid.epoch == 1
    manager.close()
    assert place(valid) == (2, 0, 2)
    used = CFIterator(loader(), marks_steps=False)
    take_all(used)
    used.load_state_dict(valid.state_dict())  # validation before it does not forbid it
    assert used.epoch == 2


# Reports


def test_a_served_epoch_is_reported_as_exact_unless_the_order_differed_between_processes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = CFIterator(loader(order=lambda seed, epoch: range(10)))
    states = [first.state_dict() for _ in first.epochs(1) for _ in first]
    report = first.last_report
    assert report is not None
    assert (report.served, report.not_served, report.exact) == (10, 0, True)
    assert report.ledger == Ledger.of(range(10))
    second = CFIterator(loader(order=lambda seed, epoch: range(9, -1, -1)))
    second.load_state_dict(states[-1])
    take_all(second)
    second.finish()
    assert second.last_report is not None
    assert second.last_report.exact is False
    assert "not served exactly once" in caplog.text


@pytest.mark.parametrize(("tail", "start"), [("short", 1), ("drop", 0), ("drop", 1)])
def test_every_rank_reports_and_audits_its_own_share(tail: Any, start: int) -> None:
    before = CFIterator(loader(batch=1, shuffle=True))
    for _ in before.steps(start):
        pass
    served, dropped = 0, (10 - start) % 4 if tail == "drop" else 0
    for rank in range(4):
        share = loader(batch=1, shuffle=True, tail=tail, rank=rank, world=4)
        iterator = CFIterator(share, audit=True)
        iterator.load_state_dict(before.state_dict())
        for _ in iterator.epochs(1):
            take_all(iterator)
        report = iterator.last_report
        assert report is not None
        assert (report.exact, report.doubled, report.missing) == (True, (), ())
        assert report.not_served == dropped
        served += report.served
    assert served == 10 - dropped


def test_weighted_losses_of_all_ranks_make_the_mean_over_the_batch() -> None:
    world, n = 4, 9
    ranks = [CFIterator(loader(n, rank=rank, world=world, batch=2)) for rank in range(world)]
    for parts in zip(*(iter(one) for one in ranks), strict=True):
        losses, used = [], []
        for iterator, part in zip(ranks, parts, strict=True):
            assert iterator.last_weights is not None
            assert iterator.last_num_samples is not None
            weights = torch.from_numpy(iterator.last_weights.copy())
            losses.append((part * weights).sum() * world / iterator.last_num_samples)
            used.append(part[weights > 0])
        assert float(sum(losses)) / world == pytest.approx(float(torch.cat(used).double().mean()))


# What cannot be resumed exactly


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_an_unknown_loader_is_refused_and_a_used_up_generator_ends_with_a_sentence() -> None:
    with pytest.raises(NotResumableError, match="list is not a loader whose place can be saved"):
        CFIterator([1, 2, 3])
    iterator = CFIterator(iter([1, 2]), exact=False)
    with pytest.raises(IterationStateError, match="it is used up"):
        list(iterator.steps(5))


UNORDERED = DataLoader(Stream(), batch_size=2, in_order=False)


@pytest.mark.parametrize(("given", "has_tqdm"), [([10, 11, 12], False), (UNORDERED, True)])
def test_exact_false_replays_and_logs_how_long_it_took_with_or_without_a_progress_bar(
    given: Any, has_tqdm: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    first = CFIterator(given, exact=False)
    assert not first.exact
    whole = [str(batch) for _ in first.epochs(2) for batch in first]
    third = CFIterator(given, exact=False)
    states = [third.state_dict() for _ in third]
    second = CFIterator(given, exact=False)
    second.load_state_dict(states[2])
    assert [str(batch) for _ in second.epochs(2) for batch in second] == whole[2:]
    assert "skipped 2 batches by loading them again, which took" in caplog.text
    assert second.last_report is not None
    assert second.last_report.exact is None
    assert CFIterator(DataLoader(Plain(4)), exact=False).exact


class Told:
    """Serves five batches, and is told the epoch."""

    def __init__(self, served: int = 5) -> None:
        self.served, self.epochs = served, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.served))


class Claiming(Told):
    """Says a length that need not be its own."""

    def __init__(self, claimed: int) -> None:
        super().__init__()
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed


@pytest.mark.parametrize(
    "make",
    [Told, lambda: Claiming(2), lambda: Claiming(9)],
    ids=["no length", "too short", "too long"],
)
def test_a_replayed_loader_whose_length_is_unknown_or_wrong_resumes(make: Any) -> None:
    manager, given = FakeManager(), make()
    iterator = CFIterator(given, exact=False, cf_manager=manager)
    with pytest.raises(TypeError, match="no length") if make is Told else nullcontext():
        assert len(iterator) == given.claimed
    for _ in iterator.epochs(1):
        for _ in iterator:
            manager.weight_update()
    assert given.epochs == [0]
    assert manager.events == ["first", "step", "step", "step", "step", "end_epoch"]
    for served, saved in enumerate(manager.positions, start=1):
        resumed = CFIterator(make(), exact=False)
        resumed.load_state_dict(saved["train"])
        assert (resumed.epoch, list(resumed)) == (served // 5, list(range(served % 5, 5)))
    given.served = 2
    shorter = CFIterator(given, exact=False)
    shorter.load_state_dict(manager.positions[3]["train"])
    with pytest.raises(ResumeMismatchError, match="number of batches of the loader is 2"):
        list(shorter)


# Arguments


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chk_freq": 5}, "give cf_manager too"),
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"steps_to_run": 0}, "steps_to_run must be at least 1"),
        ({"on_stop": "exit"}, "on_stop must be"),
        ({"seed": 3}, "seed is 3 here and 7 in the loader"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CFIterator(loader(seed=7), **options)
    with pytest.raises(ValueError, match="needs a permutation"):
        CFIterator(loader(order=lambda seed, epoch: [1, 1]), audit=True)
    for loop in (CFIterator.epochs, CFIterator.steps):
        with pytest.raises(ValueError, match="must not be negative"):
            loop(CFIterator(loader()), -1)
