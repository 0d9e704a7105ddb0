"""A small folder of images; without DALI, nothing here is collected."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

HERE = Path(__file__).parent
HAS_DALI = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
collect_ignore_glob = [] if HAS_DALI else ["test_*.py"]

#: Heights and widths: wide, tall, square, and so narrow that no window fits.
SIZES = [(30, 44), (44, 30), (36, 36), (8, 60), (60, 8)]
ORIENTATION, TURNED = 0x0112, 6


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.dali)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty images in four class folders; every third carries an EXIF orientation."""
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for index in range(40):
        folder = root / f"class{index % 4}"
        folder.mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (*SIZES[index % 5], 3), dtype=np.uint8)
        exif = Image.Exif()
        if index % 3 == 0:
            exif[ORIENTATION] = TURNED
        Image.fromarray(pixels).save(folder / f"{index}.jpg", exif=exif)
    return root


@pytest.fixture(scope="session")
def paths(images: Path) -> list[str]:
    """The images as a list of files."""
    return sorted(map(str, images.glob("*/*.jpg")))
