"""The reader: which files, what it costs, what comes out, what it refuses; and without DALI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn, pipeline_def

import iterators.dali
from iterators.dali import FileReader
from iterators.dali.files import FileList
from iterators.dali.source import BatchStart, uniforms

ROOT = Path(iterators.dali.__file__).parents[2]


def entries(files: FileList) -> list[tuple[str, int]]:
    return [(files.name(index), label) for index, label in enumerate(files.labels.tolist())]


def touched(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


ODD = ("b/2.jpg", "b/10.jpg", "b/A.JPG", "b/a.jpeg", "b/notes.txt", "b/inner/x.jpg", "a/1.png")
ODDER = ("C/9.jpg", "c10/1.jpg", "c2/1.webp", ".dot/.hidden.jpg", "é/ü.jpg", "top.jpg", "e/x.txt")


def test_the_files_of_a_folder_are_those_of_dalis_reader(tmp_path: Path) -> None:
    root = touched(tmp_path, *ODD, *ODDER)
    (root / "linked").symlink_to(root / "a")

    @pipeline_def(batch_size=32, num_threads=1, device_id=None)
    def own() -> Any:
        encoded, label = fn.readers.file(file_root=str(root), name="Reader")
        return fn.get_property(encoded, key="source_info"), label

    pipe = own()
    names, labels = pipe.run()
    expected = [
        (bytes(np.array(names[index])).decode(), int(np.array(labels[index])[0]))
        for index in range(pipe.reader_meta("Reader")["epoch_size"])
    ]
    assert entries(FileReader(file_root=root).files) == expected
    assert len(expected) == 11


def test_a_file_list_is_relative_to_itself_or_to_a_root(tmp_path: Path) -> None:
    root = touched(tmp_path, "in/list.txt")
    (root / "in" / "list.txt").write_text("b/2.jpg 7\n\n  with space.jpg\t8 \n")
    expected = [("b/2.jpg", 7), ("with space.jpg", 8)]
    for given, under in ((None, root / "in"), (root, root)):
        files = FileReader(file_list=root / "in" / "list.txt", file_root=given).files
        assert entries(files) == expected
        assert files.path(0).tobytes() == str(under / "b/2.jpg").encode()


def test_given_files_keep_their_order_and_labels(tmp_path: Path) -> None:
    names = [str(tmp_path / "b.jpg"), "a.jpg", "/elsewhere/c.jpg"]
    files = FileReader(files=names, file_root=tmp_path).files
    assert entries(files) == [("b.jpg", 0), ("a.jpg", 1), ("/elsewhere/c.jpg", 2)]
    assert files.path(1).tobytes() == str(tmp_path / "a.jpg").encode()
    assert files.path(2).tobytes() == b"/elsewhere/c.jpg"
    assert FileReader(files=["a", "b"], labels=[5, 5]).files.labels.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("train", "./c0/x"),
        ("{here}//train/", "{here}//train/./c0//x"),
        ("../{name}/train", "//{here}/train/c0/x"),
    ],
)
def test_only_the_root_itself_is_cut_from_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, name: str
) -> None:
    touched(tmp_path, "train/c0/x", "train/train/c0/x")
    monkeypatch.chdir(tmp_path)
    root, name = (one.format(here=tmp_path, name=tmp_path.name) for one in (root, name))
    files = FileReader(files=[name, "train/c0/x"], file_root=root).files
    assert entries(files) == [("c0/x", 0), ("train/c0/x", 1)]
    assert files.path(0).tobytes() == bytes(tmp_path / "train/c0/x")
    assert files.path(1).tobytes() == bytes(tmp_path / "train/train/c0/x")


@pytest.mark.parametrize("how", ["file_root", "files", "file_list"])
def test_the_working_folder_may_change(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    touched(tmp_path, "list.txt")
    (tmp_path / "list.txt").write_text("class0/0.jpg 0\n")
    monkeypatch.chdir(images.parent)
    given: dict[str, dict[str, Any]] = {
        "file_root": {"file_root": images.name},
        "files": {"files": [f"{images.name}/class0/0.jpg", f"{images.name}/class1/1.jpg"]},
        "file_list": {"file_list": tmp_path / "list.txt", "file_root": images.name},
    }
    reader = FileReader(shuffle=False, **given[how])
    monkeypatch.chdir(tmp_path)
    pipe = pipeline_def(reader, batch_size=1, num_threads=1, device_id=None)()
    assert bytes(np.array(pipe.run()[0][0])) == (images / "class0" / "0.jpg").read_bytes()


def test_a_moved_list_of_files_is_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["c0/1.jpg", "c0/2.jpg", "c1/1.jpg"]
    monkeypatch.chdir(tmp_path)
    moved = [[str(tmp_path / root / one) for one in names] for root in ("here", "over/there")]
    moved += [names, [f"./here//{one}" for one in names]]
    assert len({FileReader(files=one).fingerprint for one in moved}) == 1
    others = [FileReader(files=names[::-1]), FileReader(files=names, labels=[1, 2, 3])]
    assert len({FileReader(files=names).fingerprint, *(one.fingerprint for one in others)}) == 3
    assert FileReader(files=names, fingerprint="mine").fingerprint == "mine"


# What comes out


def test_uniforms_depend_on_seed_epoch_and_sample_alone() -> None:
    ids = np.arange(50_000)
    drawn = uniforms(BatchStart(1, 2, 0), ids, 3)
    assert (drawn.dtype, drawn.min() >= 0, drawn.max() < 1) == (np.float32, True, True)
    assert np.array_equal(uniforms(BatchStart(1, 2, 77), ids[[7, 3]], 3), drawn[[7, 3]])
    for seed, epoch in ((2, 2), (1, 3)):
        other = uniforms(BatchStart(seed, epoch, 0), ids, 3)
        assert abs(np.corrcoef(other.ravel(), drawn.ravel())[0, 1]) < 0.02
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.02


def test_uniforms_are_frozen() -> None:
    """The augmentation of a run that is resumed would change if these moved."""
    found = uniforms(BatchStart(3, 1, 0), np.array([0, 1_281_166]), 2)
    assert (found * 2**24).astype(int).tolist() == [[3843744, 3143625], [2742107, 16296756]]


def test_every_output_comes_out_as_promised(paths: list[str]) -> None:
    outputs = ("weight", "uniforms", "id", "label")
    labels = [9, 8, 7, 6, 5]
    reader = FileReader(
        files=paths[:5], labels=labels, seed=0, shuffle=False, num_uniforms=2, outputs=outputs
    )
    pipe = pipeline_def(reader, batch_size=3, num_threads=1, device_id=None)(name="Reader")
    encoded, *rest = pipe.run()
    assert bytes(np.array(encoded[1])) == Path(paths[1]).read_bytes()
    drawn = uniforms(BatchStart(0, 0, 0), np.arange(3), 2)
    for found, wanted in zip(
        rest, [np.ones((3, 1)), drawn, [[0], [1], [2]], [[9], [8], [7]]], strict=True
    ):
        assert np.array_equal(found.as_array(), wanted)
    kinds = [one.as_array().dtype.name for one in rest]
    assert kinds == ["float32", "float32", "int64", "int32"]
    assert len(pipe.run()[0]) == 2


# Refusals


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "needs file_root, file_list or files"),
        ({"files": ["a"], "labels": [1, 2]}, "1 files were given and 2 labels"),
        ({"files": ["a"], "file_list": "b"}, "not both"),
        ({"files": []}, "at least one file"),
        ({"files": ["a"], "resume_index": -1}, "are counts"),
        ({"files": ["a"], "outputs": ("id", "id")}, "outputs must be distinct names from"),
        ({"files": ["a"], "outputs": ("uniforms",)}, "do not go with num_uniforms=0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        FileReader(**settings)


def test_missing_and_empty_folders_and_bad_lines_of_a_list_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"file_root '.*nowhere' is not a folder"):
        FileReader(file_root=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"file_list '.*list.txt' is not a file"):
        FileReader(file_list=tmp_path / "list.txt")
    for line in ("a.jpg", "a.jpg one", "a.jpg -1"):
        (tmp_path / "list.txt").write_text(f"ok.jpg 0\n{line}\n")
        with pytest.raises(ValueError, match=r"list.txt, line 2: expected a path and a label"):
            FileReader(file_list=tmp_path / "list.txt")
    touched(tmp_path, "top.jpg", "a/notes.txt")
    with pytest.raises(FileNotFoundError, match=f"at least one file, found none in '{tmp_path}'"):
        FileReader(file_root=tmp_path)


def test_a_reader_outside_a_pipeline_or_that_would_serve_nothing_is_refused(
    paths: list[str],
) -> None:
    reader = FileReader(files=paths[:5], tail="drop")
    with pytest.raises(RuntimeError, match="inside a pipeline definition"):
        reader()
    with pytest.raises(ValueError, match="5 files make no whole batch of 8"):
        pipeline_def(reader, batch_size=8, num_threads=1, device_id=None)()


# Without DALI


WITHOUT_DALI = """
import sys
sys.modules["nvidia.dali"] = None
import iterators, iterators.dali
assert "torch" not in sys.modules
for name in {*iterators.dali.__all__} - {"NativeDALILoader"}:
    assert name in dir(iterators.dali)
    try:
        getattr(iterators.dali, name)
    except ImportError as error:
        assert 'pip install "checkfreq[dali]"' in str(error), error
    else:
        raise AssertionError("no error")
"""


def test_without_dali_the_package_imports_and_its_use_says_what_to_install() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_DALI], check=True, cwd=ROOT, timeout=240)
