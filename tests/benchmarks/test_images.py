"""Any folder of class folders can be trained on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)

from benchmarks.make_images import ImageSet, make
from checkfreq.examples.imagenet.images import open_images

SMALL = ImageSet(classes=2, train=10, val=3, smallest=16, largest=24)


def test_train_and_val_folders_are_the_two_sets(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    train, val, num_classes = open_images(tmp_path, image_size=32)
    assert (len(train), len(val), num_classes) == (20, 6, 2)
    assert train[0][0].shape == val[0][0].shape == (3, 32, 32)


def test_every_tenth_image_of_a_flat_folder_is_held_out(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    train, val, num_classes = open_images(tmp_path / "train", image_size=32)
    assert (len(train), len(val), num_classes) == (18, 2, 2)
    assert set(train.indices) | set(val.indices) == set(range(20))


def test_other_classes_to_validate_on_are_refused(tmp_path: Path) -> None:
    make(tmp_path, images=SMALL)
    (tmp_path / "val" / "000-stripes").rename(tmp_path / "val" / "other")
    with pytest.raises(FileNotFoundError, match="only one of them has 000-stripes, other"):
        open_images(tmp_path, image_size=32)


def test_a_folder_without_class_folders_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="any class folder"):
        open_images(tmp_path, image_size=32)
