"""Reading a mirror: bit for bit what was committed, or an error that says what is wrong there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkfreq.errors import (
    ConfigError,
    CorruptCheckpointError,
    NoCheckpointError,
)
from checkfreq.mirror import layout
from checkfreq.mirror.layout import Blob, Finish, Marker
from checkfreq.mirror.reader import MirrorReader
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.reading import StreamReader
from checkfreq.restore.restorer import Restorer
from checkfreq.store.marks import StepMark
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes
from tests.mirror.planting import Planted
from tests.restore.whole import contents, find

FILES = {
    "model.safetensors": bytes(range(256)) * 40,
    "optimizer.safetensors": b"x" * 10,
    "empty.safetensors": b"",
}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "written")
    made.open()
    for step in (1, 2, 3):
        commit_bytes(made, step, {**FILES, "own.safetensors": b"%d" % step}, attempt=f"a{step}")
    return made


@pytest.fixture
def planted(tmp_path: Path, store: CheckpointStore) -> Planted:
    made = Planted(tmp_path / "mirror")
    for step in (1, 2, 3):
        made.plant(store, step)
    return made


def reader(planted: Planted) -> MirrorReader:
    return MirrorReader(planted.mirror, sleep=lambda seconds: None)


def read(source: MirrorReader, step: int) -> dict[str, bytes]:
    """By file, the bytes of its tensors."""
    done = Restorer(source, shows_progress=False).find(step, contents)
    assert done is not None
    return done[1]


def tensor_bytes(store: CheckpointStore, step: int, name: str) -> bytes:
    entry = store.manifest(step).file(name)
    return (store.path(step) / name).read_bytes()[entry.header_bytes :]


def rewrite(planted: Planted, step: int, change: Callable[[dict[str, object]], object]) -> None:
    """Change the JSON of a marker."""
    path = planted.path_of(layout.marker_key(step))
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("piece_bytes", "read_bytes"), [(64, 8 << 20), (1000, 4096), (1 << 20, 4096)]
)
def test_every_byte_arrives_however_files_are_cut(
    store: CheckpointStore, tmp_path: Path, piece_bytes: int, read_bytes: int
) -> None:
    planted = Planted(tmp_path / "cut")
    planted.plant(store, 2, piece_bytes=piece_bytes)
    source = reader(planted)
    source.read_bytes = read_bytes
    found = read(source, 2)
    assert found == {name: tensor_bytes(store, 2, name) for name in found}
    assert {*found} == {*FILES, "own.safetensors"}


def test_steps_are_those_that_have_a_marker(planted: Planted, store: CheckpointStore) -> None:
    planted.put("checkpoints/step-7.json", b"{}")
    planted.put("checkpoints/note.txt", b"{}")
    source = reader(planted)
    assert source.steps() == [1, 2, 3]
    assert source.ever_held()
    assert source.manifest(2) == source.verify(2) == store.manifest(2)
    assert source.attempt(2) == "a2"


def test_an_empty_prefix_holds_nothing(tmp_path: Path) -> None:
    source = reader(Planted(tmp_path / "nothing"))
    assert source.steps() == []
    assert not source.ever_held()
    assert not source.holds_superseded()
    assert source.marks() == {}
    with pytest.raises(NoCheckpointError, match="holds no checkpoint of step 4"):
        source.manifest(4)


def piece(planted: Planted, index: int) -> Path:
    """An object of step 3."""
    path = planted.path_of(layout.marker_key(3))
    marker = Marker.decode(path.read_bytes(), key=layout.marker_key(3))
    return planted.path_of(marker.files["model.safetensors"][index].key)


def plant_spoilt(planted: Planted, change: Callable[[Marker], Marker]) -> None:
    planted.plant(CheckpointStore(planted.folder.parent / "written"), 3, change=change)


def without_the_last_piece(marker: Marker) -> Marker:
    files = {**marker.files, "model.safetensors": marker.files["model.safetensors"][:-1]}
    return dataclasses.replace(marker, files=files)


def plant_mixed(planted: Planted) -> None:
    """A marker of one attempt with the record of another."""
    record = CheckpointStore(planted.folder.parent / "written").record(3)
    blob = Blob(layout.manifest_key(3, "other"), len(record), layout.digest_of(record))
    plant_spoilt(planted, lambda m: dataclasses.replace(m, attempt="other", manifest=blob))
    planted.put(blob.key, record)


def claim_size(planted: Planted) -> None:
    rewrite(planted, 3, lambda value: value["manifest"].__setitem__("bytes", 1 << 40))


#: How step 3 is spoilt, and what is said of it before bytes are read.
SPOILT: dict[str, tuple[Callable[[Planted], object], str]] = {
    "a piece is gone": (lambda p: piece(p, 0).unlink(), "no such object"),
    "a piece is not named": (
        lambda p: plant_spoilt(p, without_the_last_piece),
        r"model\.safetensors.*size in bytes",
    ),
    "the record of another attempt": (plant_mixed, "attempt: expected a3, got other"),
    "another record": (
        lambda p: p.put(layout.manifest_key(3, "a3"), b"x" * 100),
        r"manifest.json.*digest|small object",
    ),
    "a record too long for its files": (claim_size, "size in bytes: expected at most 67"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_does_not_fit_is_corruption(planted: Planted, what: str) -> None:
    change, words = SPOILT[what]
    change(planted)
    with pytest.raises(CorruptCheckpointError, match=words):
        reader(planted).inspect(3)


def test_a_piece_of_the_wrong_size_is_corruption_before_memory_is_allocated(
    planted: Planted,
) -> None:
    path = piece(planted, 1)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CorruptCheckpointError, match="size in bytes: expected 1000, got 1001"):
        reader(planted).inspect(3)


@pytest.mark.parametrize("index", [2, -1])
def test_a_changed_byte_is_corruption(planted: Planted, index: int) -> None:
    path = piece(planted, index)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.*digest of"):
        read(reader(planted), 3)
    with pytest.raises(CorruptCheckpointError, match="digest"):
        reader(planted).verify(3)


def test_a_piece_that_goes_after_it_was_listed_is_corruption(planted: Planted) -> None:
    source = reader(planted)
    manifest = source.inspect(3)
    piece(planted, 0).unlink()
    with pytest.raises(CorruptCheckpointError, match="expected to be there, got no such object"):
        StreamReader(source, 3, num_threads=1).verify(manifest.files)


def test_a_step_that_is_pruned_while_it_is_read_is_no_corruption(planted: Planted) -> None:
    source = reader(planted)
    source.record(3)
    planted.path_of(layout.marker_key(3)).unlink()
    planted.path_of(layout.manifest_key(3, "a3")).unlink()
    with pytest.raises(NoCheckpointError):
        source.manifest(3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempt", "../../a"),
        ("manifest", {"key": "../secrets", "bytes": 1, "digest": "0" * 32}),
        ("files", {"model.safetensors": [{"key": "objects/../../x", "bytes": 1, "digest": "0"}]}),
    ],
)
def test_a_made_up_marker_is_corruption_and_reads_nothing_else(
    planted: Planted, field: str, value: object
) -> None:
    rewrite(planted, 3, lambda marker: marker.__setitem__(field, value))
    with pytest.raises(CorruptCheckpointError, match=r"checkpoints/step-00000003\.json"):
        reader(planted).manifest(3)


def test_a_marker_of_a_newer_format_is_no_corruption(planted: Planted) -> None:
    rewrite(planted, 3, lambda marker: marker.__setitem__("version", 99))
    with pytest.raises(ConfigError, match="newer checkfreq"):
        reader(planted).manifest(3)


@pytest.mark.parametrize("finished", [True, False])
def test_marks_and_the_end_of_the_run_are_read(planted: Planted, finished: bool) -> None:
    marks = {2: StepMark(keep=True), 3: StepMark(metrics={"loss": float("nan")}, finished=True)}
    planted.put(layout.MARKS, layout.encode_marks(marks))
    planted.put(layout.FINISHED, Finish(3, finished).encode())
    found = reader(planted).marks()
    assert found[2].keep
    assert found[3].finished is finished  # a run may be reopened
    assert str(found[3].metrics["loss"]) == "nan"


def test_damaged_marks_are_skipped(planted: Planted, caplog: pytest.LogCaptureFixture) -> None:
    planted.put(layout.MARKS, b"{")
    assert reader(planted).marks() == {}
    assert "the marks in the mirror are not read" in caplog.text


# A directory and its mirror, as one restore sees them.


@pytest.fixture
def local(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "local")
    made.open()
    return made


def found_beside(local: CheckpointStore, planted: Planted, step: int | None) -> FoundCheckpoint:
    found = find(Restorer(local.root, remote=reader(planted), shows_progress=False), step)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("here", "asked", "damaged", "expected"),
    [
        pytest.param(None, None, "", (3, "a3"), id="the newest of the mirror"),
        pytest.param(4, None, "", (4, "here"), id="a newer one here"),
        pytest.param(3, None, "", (3, "here"), id="of two, that here"),
        pytest.param(4, 2, "", (2, "a2"), id="by its number"),
        pytest.param(3, None, "here", (3, "a3"), id="the mirror's, for one that is damaged here"),
        pytest.param(3, 3, "here", (3, "a3"), id="the same by its number"),
        pytest.param(1, None, "there", (2, "a2"), id="an older one, for one that is damaged there"),
    ],
)
def test_the_step_that_is_restored_is(
    local: CheckpointStore,
    planted: Planted,
    here: int | None,
    asked: int | None,
    damaged: str,
    expected: tuple[int, str],
) -> None:
    if here is not None:
        commit_bytes(local, here, FILES, attempt="here")
    if damaged == "here":
        (local.path(3) / "model.safetensors").write_bytes(b"")
    elif damaged == "there":
        rewrite(planted, 3, lambda marker: marker.__setitem__("attempt", "x"))
    found = found_beside(local, planted, asked)
    assert (found.step, found.manifest.attempt) == expected
    assert (found.remote is None) == (expected[1] == "here")
    assert found.remote is None or found.remote.name == planted.url
    rejected = [(3, damaged == "here")] if damaged else []
    assert [(one.step, one.is_here) for one in found.rejected] == rejected


def test_a_mirror_all_set_aside_is_no_first_run(local: CheckpointStore, tmp_path: Path) -> None:
    planted = Planted(tmp_path / "aside")
    restorer = Restorer(local.root, remote=reader(planted), shows_progress=False)
    assert find(restorer, None) is None
    planted.put(layout.superseded_key(3, "a3"), b"{}")
    with pytest.raises(NoCheckpointError, match=r"superseded/ does"):
        find(restorer, None)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_damaged_the_bytes_are_right_or_it_is_corruption(
    store: CheckpointStore, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    planted = Planted(tmp_path_factory.mktemp("damaged"))
    planted.plant(store, 3)
    paths = sorted(path for path in planted.folder.rglob("*") if path.is_file())
    for _ in range(data.draw(st.integers(1, 3))):
        damage(data.draw(st.sampled_from(paths)), data)
    try:
        done = Restorer(reader(planted)).find(3, contents)
    except (CorruptCheckpointError, ConfigError, NoCheckpointError):
        return
    assert done is not None
    for name, content in done[1].items():
        assert content == tensor_bytes(store, 3, name)


def damage(path: Path, data: st.DataObject) -> None:
    if not path.exists():
        return
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content)))
    match data.draw(st.sampled_from(["remove", "cut", "flip", "insert"])):
        case "remove":
            path.unlink()
            return
        case "cut":
            del content[at:]
        case "flip" if at < len(content):
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case _:
            content[at:at] = data.draw(st.binary(min_size=1, max_size=20))
    path.write_bytes(content)
