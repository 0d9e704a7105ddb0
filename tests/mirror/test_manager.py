"""A manager whose directory has a mirror: what it restores, and from where."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import checkfreq
from checkfreq import CFManager
from checkfreq.cli import main
from checkfreq.errors import ConfigError, NoCheckpointError
from checkfreq.mirror import layout
from checkfreq.mirror.claim import ClaimKeeper
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import Finish, Marker
from checkfreq.mirror.reader import MirrorReader
from checkfreq.store.marks import StepMark
from checkfreq.store.store import CheckpointStore
from tests.contract.runs import Training, config, managed, written
from tests.mirror.planting import Planted


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A directory ``first`` beside its ``mirror``, and the bits at the boundaries of its steps."""
    folder = tmp_path_factory.mktemp("mirrored")
    bits = written(folder / "first")
    made, store = Planted(folder / "mirror"), CheckpointStore(folder / "first")
    for step in store.steps():
        made.plant(store, step)
    return folder, bits


@pytest.fixture
def bits(mirrored: tuple[Path, list[str]]) -> list[str]:
    return mirrored[1]


@pytest.fixture
def planted(tmp_path: Path, mirrored: tuple[Path, list[str]]) -> Planted:
    """A copy of the mirror, beside one of the directory."""
    for name in ("first", "mirror"):
        shutil.copytree(mirrored[0] / name, tmp_path / name)
    return Planted(tmp_path / "mirror")


def with_mirror(
    chk_dir: Path, training: Training, planted: Planted, **changes: object
) -> CFManager:
    return managed(chk_dir, training.chk, config=config(mirror=planted.url), **changes)


def piece_of(planted: Planted, step: int) -> str:
    """The key of an object that no other step names."""
    keys = {}
    for one in CheckpointStore(planted.folder.parent / "first").steps():
        key = layout.marker_key(one)
        keys[one] = Marker.decode(planted.path_of(key).read_bytes(), key=key).keys()
    others = set().union(*(keys[one] for one in keys if one != step))
    return min(key for key in keys[step] - others if key.startswith(layout.OBJECTS))


def test_a_step_that_only_the_mirror_has_is_restored_and_later_ones_here_are_set_aside(
    tmp_path: Path, planted: Planted, bits: list[str]
) -> None:
    chk_dir = tmp_path / "first"
    shutil.rmtree(chk_dir / "step-00000002")
    training = Training(seed=1)
    with with_mirror(chk_dir, training, planted, chk_freq=1) as manager:
        assert manager.restore(step=2)
        assert training.bits() == bits[1]
        training.steps(manager, 1)
        manager.wait()
    assert CheckpointStore(chk_dir).steps() == [1, 3]
    assert (chk_dir / "superseded" / "step-00000003").is_dir()


def test_training_without_a_restore_is_refused_where_only_the_mirror_has_checkpoints(
    tmp_path: Path, planted: Planted
) -> None:
    training = Training()
    manager = with_mirror(tmp_path / "new", training, planted)
    training.update(manager)
    with pytest.raises(ConfigError, match="file://.* holds checkpoints .newest: step 3."):
        manager.step()
    manager.close()


def test_a_finished_run_is_finished_on_a_new_machine(tmp_path: Path, planted: Planted) -> None:
    planted.put(layout.FINISHED, Finish(3).encode())
    with with_mirror(tmp_path / "new", Training(), planted) as manager:
        assert manager.restore()
        assert manager.finished


def test_the_best_step_may_be_in_the_mirror_alone(
    tmp_path: Path, planted: Planted, bits: list[str]
) -> None:
    marks = {1: StepMark(metrics={"loss": 0.5}), 2: StepMark(metrics={"loss": 0.25})}
    planted.put(layout.MARKS, layout.encode_marks(marks))
    training = Training(seed=1)
    with with_mirror(tmp_path / "new", training, planted) as manager:
        assert manager.best_step("loss") == 2
        assert manager.restore("best:loss")
        assert training.bits() == bits[1]
    expected = checkfreq.load(tmp_path / "first", step=1)["model"]
    found = checkfreq.load(planted.url, step="best:loss:max")["model"]
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


class TestUrls:
    def test_load_returns_what_the_directory_holds_or_says_what_there_is(
        self, tmp_path: Path, planted: Planted
    ) -> None:
        for path in (planted.url, planted.mirror):
            found, expected = checkfreq.load(path), checkfreq.load(tmp_path / "first")
            assert found.keys() == expected.keys()
            assert all(found["model"][key].equal(one) for key, one in expected["model"].items())
        with pytest.raises(NoCheckpointError, match="has no step 7; it has: 1, 2, 3"):
            checkfreq.load(planted.url, step=7)
        with pytest.raises(NoCheckpointError, match="holds no checkpoint"):
            checkfreq.load((tmp_path / "nothing").as_uri())

    def test_ls_show_and_verify_take_a_url_and_verify_looks_at_all_steps(
        self, tmp_path: Path, planted: Planted, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["ls", (tmp_path / "nothing").as_uri()]) == 1
        assert main(["ls", planted.url]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list("123")
        assert main(["show", planted.url, "2"]) == 0
        assert "checkpoints/step-00000002.json" in capsys.readouterr().out
        piece = piece_of(planted, 2)
        planted.put(piece, planted.path_of(piece).read_bytes()[:-1])
        assert main(["verify", planted.url]) == 1
        said = capsys.readouterr().out.splitlines()
        assert ["DAMAGED" in line for line in said] == [False, True, False]
        assert f"{planted.url}/{piece}: size in bytes" in said[1]

    def test_prune_and_pin_change_what_lies_there(
        self, planted: Planted, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["pin", planted.url, "1"]) == 0
        assert main(["prune", planted.url, "--last", "1", "--dry-run"]) == 0
        assert main(["prune", planted.url, "--last", "1"]) == 0
        assert "step 2: would be removed" in (said := capsys.readouterr().out)
        assert "1 removed, 2 kept" in said
        assert MirrorReader(planted.mirror).steps() == [1, 3]
        assert main(["verify", planted.url]) == 0
        assert main(["unpin", planted.url, "1"]) == 0
        assert main(["prune", planted.url, "--last", "1"]) == 0
        assert MirrorReader(planted.mirror).steps() == [3]
        assert not list(planted.folder.glob("claim.json*"))

    def test_quarantine_sets_a_step_aside(
        self, planted: Planted, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["quarantine", planted.url, "3", "--reason", "loss was NaN"]) == 0
        assert "newest that is left: step 2" in capsys.readouterr().out
        (reason,) = planted.folder.glob("superseded/step-00000003-*.txt")
        assert reason.read_text() == "loss was NaN\n"
        planted.path_of(layout.marker_key(3)).write_bytes(reason.with_suffix(".json").read_bytes())
        assert main(["verify", planted.url]) == 0  # no object of it was removed

    @pytest.mark.parametrize("verb", [["prune", "--last=1"], ["pin", "1"]])
    def test_beside_a_run_nothing_is_changed(
        self, planted: Planted, capsys: pytest.CaptureFixture[str], verb: list[str]
    ) -> None:
        claim = ClaimKeeper(RemoteObjects(planted.mirror), run="one")
        claim.take()
        assert main([verb[0], planted.url, *verb[1:]]) == 2
        assert "is in use by run one" in capsys.readouterr().err
        assert MirrorReader(planted.mirror).steps() == [1, 2, 3]
        assert MirrorReader(planted.mirror).marks() == {}
        assert claim.renew()


def test_a_url_restores_on_a_new_machine_from_a_directory_of_its_own_that_log_and_report_find(
    tmp_path: Path,
    planted: Planted,
    bits: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["log", planted.url]) == 1
    assert "for this URL this machine has none" in capsys.readouterr().err
    training = Training(seed=1)
    with managed(planted.url, training.chk, config=config()) as manager:
        assert manager.restore()
        assert training.bits() == bits[2]
        assert manager.latest_step() == 3
    assert main(["log", planted.url]) == 0
    assert "training goes on from step 3 (mirror)" in capsys.readouterr().out
    assert main(["report", "--json", planted.url]) == 0
    for url in (planted.url + "-2", planted.url + "/"):
        managed(url, Training().chk, config=config(staging_dir=tmp_path / "staging")).close()
    assert len(list((tmp_path / "staging").iterdir())) == 2
