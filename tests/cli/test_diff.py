"""``checkfreq diff``: which two, what differs, by how much, and the exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.fixtures
from checkfreq.cli import main
from checkfreq.cli.differences import MISSING, changes, difference, values
from checkfreq.formats import from_torch_save
from checkfreq.store.store import CheckpointStore
from tests.cli.golden import compare
from tests.mirror.planting import Planted

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = Path(tests.fixtures.__file__).parent
NAN, INF = float("nan"), float("inf")

Capture = pytest.CaptureFixture[str]


def save(folder: Path, step: int, **state: Any) -> Path:
    """A checkpoint of ``state`` in the directory."""
    path = folder.with_suffix(".pt")
    torch.save(state, path)
    from_torch_save(path, folder, step=step)
    path.unlink()
    return folder


@pytest.fixture
def chk(tmp_path: Path) -> Path:
    """Steps 1, 2 (other values), and 3, which is 2 again."""
    for step, shift in ((1, 0.0), (2, 0.5), (3, 0.5)):
        weight = torch.arange(8.0).reshape(2, 4)
        weight[0, 3] += shift
        weight[1, 3] -= shift / 5
        model = {"weight": weight, "bias": torch.ones(2)}
        save(tmp_path / "chk", step, model=model, extra={"epoch": min(step, 2), "lr": [0.5, 1.0]})
    return tmp_path / "chk"


def differences(*argv: object, capsys: Capture) -> tuple[int, Any]:
    status = main(["diff", "--json", *map(str, argv)])
    return status, json.loads(capsys.readouterr().out)


def test_what_differs_is_told_with_its_size(chk: Path, capsys: Capture) -> None:
    status, found = differences(chk, 1, 2, capsys=capsys)
    assert status == 1
    assert [found.pop(side) for side in "ab"] == [{"path": str(chk), "step": n} for n in (1, 2)]
    compare("diff", found)


def test_for_people_it_is_a_table_and_a_summary(chk: Path, capsys: Capture) -> None:
    assert main(["diff", str(chk), "1", "2", "--histogram"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"A  step 1 of {chk}", f"B  step 2 of {chk}"]
    assert lines[4].split() == [
        *("model.weight", "float32", "[2,", "4]", "2", "of", "8", "25", "%", "0.5", "0.143", "-")
    ]
    assert [line.split() for line in lines if "#" in line] == [
        ["1e-02", "to", "1e-01", "#" * 40, "1"],
        ["1e-01", "to", "1e+00", "#" * 40, "1"],
    ]
    assert lines[-2:] == [
        "extra.tree.epoch: 1 in A, 2 in B",
        "different: 1 of 5 tensors, 1 other value(s)",
    ]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["chk"], (2, 3)),
        (["chk", "1"], (1, 3)),
        (["chk", "3", "1"], (3, 1)),
        (["chk/step-00000001"], (1, 3)),
        (["chk", "other"], (3, 7)),
        (["chk", "other", "2"], (2, 2)),
        (["chk/step-00000001", "other"], (1, 7)),
    ],
)
def test_two_checkpoints_can_be_named_in_several_ways(
    words: list[str],
    steps: tuple[int, int],
    chk: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in (2, 7):
        save(chk.parent / "other", step, model={"weight": torch.ones(2)})
    monkeypatch.chdir(chk.parent)
    _, found = differences(*words, capsys=capsys)
    assert (found["a"]["step"], found["b"]["step"]) == steps


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chk", "1", "2", "3"], "expected two steps of a directory"),
        (["chk", "9", "1"], "has no step 9; it has: 1, 2, 3"),
        (["chk", "none"], "is not a directory"),
        (["what://bucket/run", "chk"], "what://bucket/run"),
        (["chk", "1", "2", "--only", "modle"], "expected one of model, extra"),
        (["alone"], "expected two steps to compare, found step 4 alone"),
    ],
)
def test_trouble_ends_with_2_as_in_diff(
    words: list[str],
    said: str,
    chk: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(chk.parent / "alone", 4, model={"weight": torch.ones(2)})
    monkeypatch.chdir(chk.parent)
    assert main(["diff", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("checkfreq: ")


def test_of_a_mirror_only_what_differs_is_fetched(chk: Path, capsys: Capture) -> None:
    pytest.importorskip("obstore")
    planted = Planted(chk.parent / "mirror")
    planted.plant(CheckpointStore(chk), 2)
    for path in (planted.folder / "objects").rglob("*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    assert differences(chk, planted.url, 2, capsys=capsys)[0] == 0  # the digests are equal
    assert main(["diff", str(chk), planted.url, "1", "2"]) == 2
    assert "expected digest" in capsys.readouterr().err


def test_tensors_that_are_missing_or_of_another_kind_are_named(
    tmp_path: Path, capsys: Capture
) -> None:
    chk = tmp_path / "chk"
    save(chk, 1, model={"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, old={"x": 1})
    save(chk, 2, model={"a": torch.ones(3), "b": torch.ones(2).half(), "d": torch.ones(1)})
    status, found = differences(chk, 1, 2, capsys=capsys)
    assert status == 1
    assert [one["name"] for one in found["changed_tensors"]] == ["model.a", "model.b"]
    assert (found["only_in_a"], found["only_in_b"]) == (["model.c"], ["model.d"])
    assert "old" in [one["name"] for one in found["different_values"] if "b" not in one]
    main(["diff", str(chk), "1", "2"])
    said = capsys.readouterr().out
    assert "model.b: float32 [2] in A, float16 [2] in B\n" in said
    assert "model.c: only in A\n" in said


def test_damage_is_trouble_and_not_a_difference(chk: Path, capsys: Capture) -> None:
    path = chk / "step-00000001" / "model.safetensors"
    data = bytearray(path.read_bytes())
    entry = CheckpointStore(chk).manifest(1).file("model.safetensors")
    data[next(tensor.offset for tensor in entry.tensors if tensor.name == "weight")] ^= 1
    path.write_bytes(data)
    assert main(["diff", str(chk), "1", "2"]) == 2
    assert "expected digest" in capsys.readouterr().err
    path.write_bytes(data[:-1])
    assert main(["diff", str(chk), "1", "2"]) == 2
    assert "size in bytes" in capsys.readouterr().err


def test_links_are_not_followed(chk: Path, capsys: Capture) -> None:
    shutil.move(chk / "step-00000002", chk.parent / "elsewhere")
    (chk / "step-00000002").symlink_to(chk.parent / "elsewhere")
    assert main(["diff", str(chk), "1", "2"]) == 2
    assert "is a symbolic link, not followed" in capsys.readouterr().err


# ---- numbers

EVERY_BYTE = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu"])
def test_every_byte_of_a_float8_is_decoded_as_torch_does(name: str) -> None:
    expected = EVERY_BYTE.view(getattr(torch, f"float8_{name}")).double().numpy()
    np.testing.assert_array_equal(values(EVERY_BYTE.numpy(), f"float8_{name}"), expected)


def test_bfloat16_and_complex32_are_decoded_as_torch_does() -> None:
    bits = torch.arange(0, 1 << 16, 7, dtype=torch.int32).to(torch.uint16)
    expected = bits.view(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(values(bits.numpy(), "bfloat16"), expected)
    packed = np.array([1.5, -2.0], np.float16).view(np.uint32)
    assert values(packed, "complex32").tolist() == [1.5 - 2j]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # different, NaN in one, largest difference, largest relative difference
        ([1.0, NAN], [1.0, NAN], (0, 0, None, None)),
        ([1.0, NAN], [2.0, NAN], (1, 0, 1.0, 0.5)),
        ([1.0, NAN], [1.0, 3.0], (1, 1, None, None)),
        ([0.0], [-0.0], (1, 0, 0.0, 0.0)),
        ([0.0, 4.0], [2.0, 5.0], (2, 0, 2.0, 1.0)),
        ([INF, INF], [INF, 1.0], (1, 0, INF, INF)),
        ([INF], [-INF], (1, 0, INF, INF)),
    ],
)
def test_odd_values_are_compared_by_their_bits(
    a: list[float], b: list[float], expected: tuple[Any, ...]
) -> None:
    found = difference(np.array(a), np.array(b), "float64")
    assert (found.num_different, found.num_nan, found.max_abs, found.max_rel) == expected


@pytest.mark.parametrize(
    ("dtype", "a", "b", "max_abs"),
    [
        ("int64", -(2**63), 2**63 - 1, 2.0**64),
        ("uint64", 0, 2**64 - 1, 2.0**64),
        ("int8", -128, 127, 255.0),
        ("bool", False, True, 1.0),
        ("complex128", 3 + 4j, 0j, 5.0),
        ("float16", 1.0, 1.5, 0.5),
    ],
)
def test_every_kind_of_number_is_compared(dtype: str, a: Any, b: Any, max_abs: float) -> None:
    found = difference(np.array([a], dtype), np.array([b], dtype), dtype)
    assert (found.num_different, found.max_abs) == (1, max_abs)


def test_a_tensor_of_several_chunks_is_compared_whole() -> None:
    a = np.zeros((3, 1 << 20), np.float32)
    b = a.copy()
    b[0, 0], b[1, 5], b[2, -1] = 1e-3, 0.5, 30.0
    found = difference(a, b, "float32")
    assert (found.num_different, found.max_abs) == (3, 30.0)
    assert dict(found.decades) == {-3: 1, -1: 1, 1: 1}


def test_trees_are_compared_leaf_by_leaf() -> None:
    a = {"x": [1, {"y": 2.0}], "same": "s", "gone": None, "list": [1, 2], "kind": 1}
    b = {"x": [1, {"y": 3.0}], "same": "s", "new": 4, "list": [1], "kind": True}
    found = {one.name: (one.a, one.b) for one in changes(a, b, "o")}
    assert found == {
        "o.x[1].y": (2.0, 3.0),
        "o.gone": (None, MISSING),
        "o.list": ([1, 2], [1]),
        "o.kind": (1, True),
        "o.new": (MISSING, 4),
    }
