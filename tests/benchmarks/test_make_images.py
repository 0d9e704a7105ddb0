"""The image set is a function of its settings, and shaped as data loaders expect."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from benchmarks.make_images import ImageSet, class_names, make

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


def test_each_class_has_a_folder_in_both_splits(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    for split, count in (("train", 3), ("val", 2)):
        folders = sorted((tmp_path / split).iterdir())
        assert [folder.name for folder in folders] == class_names(5)
        assert [len(list(folder.iterdir())) for folder in folders] == [count] * 5


def test_a_finished_set_is_kept(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert make(tmp_path, images=SMALL) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
