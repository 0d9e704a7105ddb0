"""What the command line prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkfreq.cli import main
from checkfreq.store.joint import JointStore
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes
from tests.fixtures import format_2
from tests.hostile import grammar
from tests.store.ranks import commit_jointly

ROOT = Path(__file__).resolve().parents[2]

Write = Callable[[int], Path]
Capture = pytest.CaptureFixture[str]


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_lists_checkpoints_oldest_first_and_counts_other_directories(
    write: Write, store: CheckpointStore, capsys: Capture
) -> None:
    for step in (20, 5):
        write(step)
    assert main(["ls", str(store.root)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["STEP", "CREATED", "BYTES", "WORLD", "STATE", "MARKS"]
    assert [line.split()[0] for line in lines] == ["5", "20"]
    assert lines[0].split()[-4:] == ["40", "B", "1", "ok"]
    store.add_mark(5, keep=True, metrics={"accuracy": 0.5})
    store.quarantine(20, "for the test")
    store.begin(7, attempt="a2")
    assert main(["ls", str(store.root)]) == 0
    _, line, *others = capsys.readouterr().out.splitlines()
    assert line.endswith("ok     keep accuracy=0.5")
    assert others == ["1 being written, or interrupted (.tmp-*)", "1 in quarantine/"]
    assert main(["ls", "--json", str(store.root)]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["step"], row["num_bytes"], row["state"]) == (5, 40, "ok")


def test_show_describes_the_newest_checkpoint_or_one_by_its_name_with_tensors_when_asked(
    write: Write, store: CheckpointStore, capsys: Capture
) -> None:
    for step in (5, 6):
        write(step)
    assert main(["show", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert "step     6\n" in out
    assert "versions checkfreq 0.1.0\n" in out
    assert "model.safetensors  40 B   1\n" in out
    assert "state that is not tensors: scheduler\n" in out
    assert "fc.weight" not in out
    for name in ("5", "chk/step-00000005/"):
        assert main(["show", str(store.root), name, "--tensors", "--objects"]) == 0
        out = capsys.readouterr().out
        assert "step     5\n" in out
        assert "fc.weight  float32  [2, 3]  24 " in out
        assert '"last_epoch": 5' in out


def test_verify_json_is_one_object_per_line(
    write: Write, store: CheckpointStore, capsys: Capture
) -> None:
    flip_last_byte(write(5) / "model.safetensors")
    manifest = write(6) / "manifest.json"
    manifest.write_bytes(_of_a_later_version(manifest.read_bytes()))
    write(7)
    (store.root / "step-00000008").symlink_to(write(7).parent / "elsewhere")
    assert main(["verify", str(store.root), "--json", "--threads", "1"]) == 1
    damaged, unreadable, ok, link = map(json.loads, capsys.readouterr().out.splitlines())
    assert ok.pop("seconds") >= 0
    assert ok == {"step": 7, "state": "ok", "num_bytes": 40}
    assert (damaged["step"], damaged["state"]) == (5, "damaged")
    assert "digest of tensor fc.weight: expected " in damaged["error"]
    assert (unreadable["step"], unreadable["state"]) == (6, "unreadable")
    assert "newer checkfreq" in unreadable["error"]
    assert link == {
        "step": 8,
        "state": "link",
        "error": "a symbolic link: no checkpoint, not followed",
    }


def test_what_cannot_be_read_is_not_damage(
    write: Write, store: CheckpointStore, capsys: Capture
) -> None:
    manifest = write(5) / "manifest.json"
    manifest.write_bytes(_of_a_later_version(manifest.read_bytes()))
    write(6)
    assert main(["verify", str(store.root)]) == 2
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 5: CANNOT BE READ: ")
    assert second.startswith("step 6: ok")
    assert main(["verify", str(store.root), "6"]) == 0
    assert main(["verify", str(store.root), "5"]) == 2
    assert "newer checkfreq" in capsys.readouterr().err
    assert main(["show", str(store.root), "5"]) == 2
    assert "newer checkfreq" in capsys.readouterr().err


def test_looking_changes_nothing(write: Write, store: CheckpointStore) -> None:
    flip_last_byte(write(5) / "model.safetensors")
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    for verb in ("ls", "show", "verify"):
        main([verb, str(store.root)])
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before


def test_what_is_not_there_is_said_in_a_sentence(
    write: Write, store: CheckpointStore, tmp_path: Path, capsys: Capture
) -> None:
    write(5)
    (tmp_path / "empty").mkdir()
    for verb in ("ls", "show", "verify", "prune"):
        for name, said in ("none", "is not a directory"), ("empty", "holds no checkpoint"):
            assert main([verb, str(tmp_path / name)]) == 1
            assert f"checkfreq: {tmp_path / name} {said}" in capsys.readouterr().err
    for verb in ("show", "verify"):
        assert main([verb, str(store.root), "7"]) == 1
        assert "holds no checkpoint of step 7" in capsys.readouterr().err


def _of_a_later_version(data: bytes) -> bytes:
    from checkfreq.store.manifest import digest_of

    old_digest = data.split(b'"digest": "')[1][:16]
    blank = data.replace(b'"format_version": 1', b'"format_version": 5').replace(
        old_digest, b"0" * 16, 1
    )
    return blank.replace(b"0" * 16, digest_of(blank).encode(), 1)


OF_RANKS = str(format_2.FOLDER)


def test_a_checkpoint_of_several_ranks_is_listed_shown_and_verified_as_any_other(
    capsys: Capture,
) -> None:
    assert main(["ls", OF_RANKS]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells[-3:] == ["2", "ok", "loss=0.5"]
    assert main(["verify", OF_RANKS]) == 0
    assert capsys.readouterr().out.startswith("step 2: ok")
    assert main(["show", OF_RANKS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "world    2" in lines
    assert "model.rank-00001.safetensors      4.1 KiB   3" in lines
    assert lines[-3:] == [
        "state that is not tensors: model, optimizer, scheduler, extra",
        "rank 0's own: rng, model, optimizer",
        "rank 1's own: rng, model, optimizer",
    ]
    assert main(["show", OF_RANKS, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["ranks"]) == ["0", "1"]


def test_a_closed_pipe_is_not_an_error(write: Write, store: CheckpointStore) -> None:
    write(5)
    command = f"{sys.executable} -m checkfreq.cli show {store.root} --objects | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_text_from_a_checkpoint_cannot_control_the_terminal(
    tmp_path: Path, capsys: Capture
) -> None:
    hostile = "x\x1b[2J\x7f\n\u202e\ud800"
    store = CheckpointStore(tmp_path)
    commit_bytes(store, 1, {"m": b"abc"})
    folder = store.path(1)
    found = grammar.read_manifest(folder)
    found["versions"] = {hostile: hostile}
    found["objects"] = {hostile: {hostile: hostile}}
    found["files"][0]["tensors"][0]["name"] = hostile
    found["created_unix_s"] = 2**62
    grammar.write_manifest(folder, found)
    store.add_mark(1, metrics={hostile: 0.5})
    for command in (
        *(["ls"], ["ls", "--json"], ["show"], ["show", "--json"], ["verify"]),
        *(["verify", "--json"], ["prune", "--dry-run"], ["pin", "1"], ["diff", "1", "1"]),
        ["show", "--objects", "--tensors"],
    ):
        assert main([command[0], str(tmp_path), *command[1:]]) == 0
        text = capsys.readouterr().out
        assert [c for c in text if not c.isprintable() and c != "\n"] == [], command
    found["files"][0]["tensors"][0]["dtype"] = hostile
    grammar.write_manifest(folder, found)
    assert main(["show", str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert [c for c in text if not c.isprintable() and c != "\n"] == []


def test_show_finds_the_best_by_its_name(
    write: Write, store: CheckpointStore, capsys: Capture
) -> None:
    for step, loss in ((5, 0.2), (6, 0.5)):
        write(step)
        store.add_mark(step, metrics={"loss": loss})
    for name, step in (("best:loss", 5), ("best:loss:max", 6)):
        assert main(["show", str(store.root), name]) == 0
        assert f"step     {step}\n" in capsys.readouterr().out
    assert main(["show", str(store.root), "best:f1"]) == 1


def test_the_records_of_many_ranks_are_shown_and_verified_one_after_another(
    tmp_path: Path, capsys: Capture
) -> None:
    tree = JointStore(tmp_path / "tree", is_tree=True)
    tree.open()
    commit_jointly(tree, 5, world=3)
    where = str(tree.root)
    assert main(["show", where, "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "world    3\n" in shown
    for rank in range(3):
        assert f"m.rank-{rank:05d}.safetensors:" in shown
        assert f"rank {rank}'s own: m, rng" in shown
    assert main(["verify", where]) == 0
    assert capsys.readouterr().out.startswith("step 5: ok")
    flip_last_byte(tree.path(5) / "rng.rank-00002.safetensors")
    assert main(["verify", where]) == 1
    assert "rng.rank-00002" in capsys.readouterr().out
