"""The image set is a function of its settings, and shaped as data loaders expect."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.make_images import ImageSet, class_names, main, make

SMALL = ImageSet(classes=5, train=3, val=2, smallest=16, largest=24)


def images_of(root: Path) -> dict[str, Image.Image]:
    found = {}
    for path in sorted(root.rglob("*.jpg")):
        with Image.open(path) as image:
            found[str(path.relative_to(root))] = image.convert("RGB")
    return found


def pixels(root: Path) -> dict[str, bytes]:
    return {name: image.tobytes() for name, image in images_of(root).items()}


def test_same_settings_make_the_same_pixels(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert make(tmp_path / name, images=SMALL) == 5 * (3 + 2)
    assert pixels(tmp_path / "a") == pixels(tmp_path / "b")


def test_a_different_seed_gives_different_pixels_in_the_same_files(tmp_path: Path) -> None:
    make(tmp_path / "a", images=SMALL)
    make(
        tmp_path / "b", images=ImageSet(classes=5, train=3, val=2, smallest=16, largest=24, seed=1)
    )
    first, second = pixels(tmp_path / "a"), pixels(tmp_path / "b")
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_no_image_is_made_twice(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    found = pixels(tmp_path)
    assert len(set(found.values())) == len(found)


def test_each_class_has_a_folder_in_both_splits(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    for split, count in (("train", 3), ("val", 2)):
        folders = sorted((tmp_path / split).iterdir())
        assert [folder.name for folder in folders] == class_names(5)
        assert [len(list(folder.iterdir())) for folder in folders] == [count] * 5


def test_sizes_vary_within_the_limits(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    sizes = {image.size for image in images_of(tmp_path).values()}
    assert len(sizes) > 5
    assert all(16 <= side <= 24 for size in sizes for side in size)


def test_a_finished_set_is_kept(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert make(tmp_path, images=SMALL) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_set_with_other_settings_is_not_overwritten(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    with pytest.raises(SystemExit, match="holds another set"):
        make(tmp_path, images=ImageSet())


def test_command_line_takes_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tmp_path), "--classes", "2", "--train", "1", "--val", "1", "--largest", "80"])
    assert capsys.readouterr().out == f"4 files written under {tmp_path}\n"
