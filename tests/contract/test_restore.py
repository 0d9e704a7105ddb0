"""The contract's ``restore``."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkfreq
from checkfreq import CFCheckpoint, KeepLast
from checkfreq.errors import (
    ConfigError,
    CorruptCheckpointError,
    NoCheckpointError,
    StateError,
)
from checkfreq.restore.restorer import Restorer
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes
from iterators import CFIterator, ResumeMismatchError
from tests.acceptance.disks import failing_calls
from tests.contract.conftest import Hold, SetFault
from tests.contract.runs import (
    Training,
    config,
    generator_bits,
    loader,
    managed,
    restored,
    running,
    train,
    written,
)


def flip(chk_dir: Path, step: int, name: str = "model.safetensors", at: int = -1) -> None:
    """Damage a byte of a file of a step: the last."""
    path = CheckpointStore(chk_dir).path(step) / name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_verified_before_it_is_loaded_nothing_is_changed_if_none_validates(chk_dir: Path) -> None:
    written(chk_dir, 2)
    for step in (1, 2):
        flip(chk_dir, step)
    training = Training(seed=1)
    bits = training.bits()
    settings = config(verify_before_load=True)
    with managed(chk_dir, training.chk, config=settings) as manager:
        with pytest.raises(CorruptCheckpointError, match="at least one that validates"):
            manager.restore()
        assert training.bits() == bits


def test_after_a_restore_that_left_parts_of_a_checkpoint_every_call_raises(chk_dir: Path) -> None:
    written(chk_dir, 1)
    flip(chk_dir, 1)
    with running(chk_dir, seed=1) as (training, manager):
        with pytest.raises(CorruptCheckpointError, match="at least one that validates") as caught:
            manager.restore()
        assert "live objects hold parts of step" in str(caught.value)
        calls: list[Callable[[], Any]] = [
            manager.restore,
            manager.step,
            manager.save,
            manager.wait,
            manager.finish,
            manager.end_epoch,
            manager.before_first_batch,
            lambda: manager.weight_update(training.optimizer.step),
            lambda: manager.updating().__enter__(),
            lambda: manager.register_position("late", None),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(StateError, match=r"hold parts of step 1.*Start a new process"):
                call()


def test_a_damaged_newest_checkpoint_is_walked_past_reported_and_quarantined(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bits = written(chk_dir, 3)
    flip(chk_dir, 3)
    with running(chk_dir, seed=1) as (training, manager):
        assert manager.restore()
        assert training.bits() == bits[1]
        assert manager.global_step == 2
        event = manager.last_event
        assert event is not None
        assert (event.kind, event.step, event.data["steps_lost"]) == ("restored", 2, 1)
    text = caplog.text
    assert "step 3 does not validate and is quarantined" in text
    assert "going back to step 2 loses 1 step(s)" in text
    assert [path.name for path in (chk_dir / "quarantine").glob("step-*3")] == ["step-00000003"]


def test_a_newest_checkpoint_that_cannot_be_read_is_walked_past_and_stays_as_it_is(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bits = written(chk_dir, 3)
    bad = chk_dir / "step-00000003" / "model.safetensors"
    with running(chk_dir, seed=1, chk_freq=99) as (training, manager):
        with failing_calls(os.getpid(), "preadv,preadv2", "EIO", path=bad):
            assert manager.restore()
        assert training.bits() == bits[1]
        assert not (chk_dir / "quarantine").exists()
        training.steps(manager, 1)
        manager.save(wait=True)
    assert "step 3 cannot be read and stays as it is" in caplog.text
    assert "going back to step 2 loses 1 step(s)" in caplog.text
    assert (chk_dir / "superseded" / "step-00000003").is_dir()
    assert CheckpointStore(chk_dir).verify(3)


def test_a_step_asked_for_is_restored_or_an_error_and_no_other_step_is(
    chk_dir: Path, trainer_fault: SetFault
) -> None:
    bits = written(chk_dir, 3)
    flip(chk_dir, 3)
    with running(chk_dir, seed=1) as (training, manager):
        with pytest.raises(NoCheckpointError, match="has no step 7; it has: 1, 2, 3"):
            manager.restore(7)
        trainer_fault("restore.read:raise-EIO:1")  # for a moment: it is read again
        assert manager.restore(2)
        assert training.bits() == bits[1]
        with pytest.raises(CorruptCheckpointError, match="step-00000003"):
            manager.restore(3)


def test_only_the_first_commit_moves_steps_aside_however_many_are_on_their_way(
    chk_dir: Path, hold_worker: Hold
) -> None:
    written(chk_dir, 3)
    gate = hold_worker("commit.mkdir")
    with running(chk_dir, seed=1, retention=KeepLast(99)) as (training, manager):
        manager.restore(1)
        for _ in range(2):
            training.steps(manager, 1)
            manager.save(keep=True)
        bits = training.bits()
        gate.open()
        manager.wait()
        assert manager.all_steps() == [1, 2, 3]
    assert CheckpointStore(chk_dir).marks()[2].keep
    aside = sorted(path.name for path in (chk_dir / "superseded").iterdir())
    assert aside == ["step-00000002", "step-00000003"]
    assert restored(chk_dir).bits() == bits


def test_fresh_starts_over_and_sets_the_old_ones_aside_once_whatever_worker_does_it(
    chk_dir: Path, worker_fault: SetFault
) -> None:
    written(chk_dir, 1)
    worker_fault("commit.mkdir:kill-self:2")
    with running(chk_dir, seed=1, fresh=True) as (training, manager):
        assert manager.restore() is False
        for _ in range(2):
            training.steps(manager, 1)
            manager.save()
        manager.wait()
        assert manager.stats()["num_workers_replaced"] == 1
        assert manager.all_steps() == [1, 2]
        bits = training.bits()
    aside = [path.name for path in (chk_dir / "superseded").iterdir()]
    assert aside == ["step-00000001"]
    assert restored(chk_dir).bits() == bits


def test_only_and_exclude_choose_what_is_restored_by_names_that_exist(chk_dir: Path) -> None:
    written(chk_dir, 1)
    for choice in ({"only": ["model"]}, {"exclude": ["optimizer", "scheduler", "rng"]}):
        with running(chk_dir, seed=1) as (training, manager):
            generators = generator_bits()
            arguments: dict[str, Any] = choice
            assert manager.restore(**arguments)
        saved = checkfreq.load(chk_dir)["model"]
        for name, tensor in training.model.state_dict().items():
            assert torch.equal(tensor, saved[name])
        assert not training.optimizer.state
        assert generator_bits() == generators
    with (
        managed(chk_dir, Training().chk) as manager,
        pytest.raises(ConfigError, match="unknown modle"),
    ):
        manager.restore(only=["modle"])


def test_it_is_a_state_error_after_iteration_began(chk_dir: Path) -> None:
    written(chk_dir, 1)
    with running(chk_dir, fresh=True) as (training, manager):
        training.update(manager)
        with pytest.raises(StateError, match="after iteration began"):
            manager.restore()


class Stubborn:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("tracks_stubborn", "num_samples", "is_in_use", "error", "said"),
    [
        (False, 12, True, (StateError, RuntimeError), None),
        (False, 8, False, ResumeMismatchError, None),
        (True, 12, False, StateError, r"stubborn.*ValueError: no"),
    ],
    ids=["a batch in use", "a position in different data", "a load_state_dict that raises"],
)
def test_what_cannot_be_restored_is_refused_and_nothing_changed(
    tracks_stubborn: bool, num_samples: int, is_in_use: bool, error: Any, said: str, chk_dir: Path
) -> None:
    more = {"stubborn": Stubborn()} if tracks_stubborn else {}
    training = Training(**more)
    with managed(chk_dir, training.chk) as manager:
        train(training, manager, CFIterator(loader(), cf_manager=manager), 1)
    training = Training(seed=1, **more)
    with managed(chk_dir, training.chk) as manager:
        iterator = CFIterator(loader(num_samples=num_samples), cf_manager=manager)
        batches = iter(iterator) if is_in_use else None
        if batches is not None:
            next(batches)
        before, place = training.bits(), iterator.state_dict()
        with pytest.raises(error, match=said):
            manager.restore()
        assert training.bits() == before
        assert iterator.state_dict() == place
        assert manager.global_step == 0


def test_a_position_restored_before_its_iterator_exists_is_applied_when_that_registers(
    chk_dir: Path,
) -> None:
    with running(chk_dir) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager, name="images", steps_to_run=2)
        train(training, manager, iterator, 1)
        expected = iterator.state_dict()
    with running(chk_dir, seed=1) as (training, manager):
        manager.restore()
        iterator = CFIterator(loader(), cf_manager=manager, name="images")
        assert iterator.state_dict() == expected
        assert iterator.batch == 2


def test_a_position_without_its_iterator_is_kept(chk_dir: Path) -> None:
    with running(chk_dir) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager, steps_to_run=2)
        train(training, manager, iterator, 1)
        expected = iterator.state_dict()
    with running(chk_dir, chk_freq=1) as (training, manager):
        manager.restore()
        training.steps(manager, 1)
    with running(chk_dir) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)
        manager.restore()
        assert manager.global_step == 3
        assert iterator.state_dict() == expected


def test_a_look_at_the_data_does_not_change_the_random_numbers_of_training(chk_dir: Path) -> None:
    reference = Training()
    with managed(chk_dir, reference.chk, chk_freq=1) as manager:
        train(reference, manager, CFIterator(loader(), cf_manager=manager), 1, each=manager.wait)
        expected = reference.bits()
    with running(chk_dir, seed=1) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)
        assert manager.restore(1)
        (x,) = next(iter(iterator))
        training.model.eval()(x)
        training.model.train()
        torch.rand(7)
        train(training, manager, iterator, 1)
        assert training.bits() == expected


@pytest.mark.parametrize("opens_first", [True, False])
def test_a_manifest_that_changed_while_the_directory_was_opened_is_read_again_and_not_trusted(
    opens_first: bool, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path)
    store.open()
    commit_bytes(store, 1, {"a.safetensors": b"before"}, attempt="before")
    changed: list[str] = []

    def found_while(open_directory: Callable[[int], None]) -> Any:
        return Restorer(tmp_path).find_while_opening(
            None,
            look=lambda found: found.manifest.attempt,
            change=changed.append,
            open_directory=open_directory,
            opens_first=opens_first,
        )

    def supersede(found: int) -> None:
        assert found == 1
        commit_bytes(store, 1, {"a.safetensors": b"after"}, attempt="after", supersede_after=0)

    done = found_while(supersede)
    assert done is not None
    assert done[0].manifest.attempt == "after"
    assert changed == (["after"] if opens_first else ["before", "after"])
    changed.clear()
    with pytest.raises(CorruptCheckpointError, match="own digest"):
        found_while(lambda found: flip(tmp_path, 1, "manifest.json", at=-10))
    assert changed == ([] if opens_first else ["after"])


def test_restoring_the_newest_after_an_older_one_sets_nothing_aside(chk_dir: Path) -> None:
    bits = written(chk_dir, 3)
    with running(chk_dir, seed=1) as (training, manager):
        manager.restore(1)
        assert training.bits() == bits[0]
        manager.restore()
        assert training.bits() == bits[2]
        training.steps(manager, 1)
        manager.save(wait=True)
    assert CheckpointStore(chk_dir).steps() == [2, 3, 4]
    assert not (chk_dir / "superseded").exists()


class Unpickling(torch.nn.Module):
    """Extra state is a pickle in a tensor of bytes, as TransformerEngine's is."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0]

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(self.scales)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scales = pickle.loads(bytes(state.tolist()))


def test_extra_state_that_somebody_else_saved_is_refused_until_the_user_says_otherwise(
    chk_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, mine, again = Unpickling(), Unpickling(), Unpickling()
    theirs.scales = [2.0]
    with monkeypatch.context() as stranger:
        stranger.setenv("XDG_STATE_HOME", str(tmp_path / "stranger"))
        with managed(chk_dir, CFCheckpoint(model=theirs)) as manager:
            manager.save(wait=True)
    with managed(chk_dir, CFCheckpoint(model=mine)) as manager:
        with pytest.raises(ConfigError, match=r"^model\._extra_state is not given to set_extra"):
            manager.restore()
        assert mine.scales == [1.0]
    with pytest.raises(ConfigError, match="is not given to"):
        checkfreq.load(chk_dir, into={"model": mine})
    trusting = config(trust_extra_state=True)
    with managed(chk_dir, CFCheckpoint(model=mine), config=trusting) as manager:
        assert manager.restore()
        assert mine.scales == [2.0]
        manager.step()
        manager.save(wait=True)
    with managed(chk_dir, CFCheckpoint(model=again)) as manager:
        assert manager.restore()
        assert again.scales == [2.0]
