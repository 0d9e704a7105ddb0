"""A small, learnable set of real JPEG files: ``python -m benchmarks.make_images OUT``.

Layout: ``OUT/train/<class>/00000.jpg`` and ``OUT/val/<class>/...``. Classes differ visibly (each
has its own pattern and hue), sizes vary from image to image, and every image is a function
of (seed, split, class, index) alone: the same arguments give the same pixels.
"""

from __future__ import annotations

import argparse
import colorsys
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.float64]
SPLITS = ("train", "val")
SETTINGS_FILE = "images.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """What to generate. Counts are images per class; sizes are the side lengths in pixels."""

    classes: int = 8
    train: int = 100
    val: int = 20
    smallest: int = 72
    largest: int = 144
    seed: int = 0

    def count(self, split: str) -> int:
        """Images per class in ``split``."""
        return self.train if split == "train" else self.val


def stripes(u: Array, v: Array) -> Array:
    """Bands across ``u``; the grids ``u, v`` are [H, W], in periods of the pattern."""
    return np.sin(2 * np.pi * u)


def checks(u: Array, v: Array) -> Array:
    """A chess board."""
    return np.sign(np.sin(2 * np.pi * u) * np.sin(2 * np.pi * v))


def rings(u: Array, v: Array) -> Array:
    """Circles around the middle."""
    return np.sin(2 * np.pi * np.hypot(u, v))


def dots(u: Array, v: Array) -> Array:
    """Round spots on a square grid."""
    return np.where(np.hypot(u % 1 - 0.5, v % 1 - 0.5) < 0.3, 1.0, -1.0)


PATTERNS: tuple[Callable[[Array, Array], Array], ...] = (stripes, checks, rings, dots)


def class_names(count: int) -> list[str]:
    """The folder names, in the order of their labels."""
    return [f"{label:03d}-{PATTERNS[label % len(PATTERNS)].__name__}" for label in range(count)]


def draw(label: int, *, images: ImageSet, rng: np.random.Generator) -> Image.Image:
    """One image of class ``label``: its pattern and hue; size, angle, scale and position vary."""
    width, height = (int(n) for n in rng.integers(images.smallest, images.largest + 1, size=2))
    y, x = np.mgrid[0:height, 0:width] / images.largest - rng.uniform(0.2, 0.5, size=(2, 1, 1))
    angle, periods = rng.uniform(0, np.pi), rng.uniform(4, 7)
    u = periods * (x * np.cos(angle) + y * np.sin(angle))
    v = periods * (y * np.cos(angle) - x * np.sin(angle))
    light = 0.55 + 0.3 * PATTERNS[label % len(PATTERNS)](u, v)
    hue = (label / images.classes + rng.normal(0, 0.02)) % 1.0
    colour = np.array(colorsys.hsv_to_rgb(hue, 0.7, 1.0))
    pixels = light[..., None] * colour + rng.normal(0, 0.08, size=(height, width, 3))
    return Image.fromarray((pixels.clip(0, 1) * 255).astype(np.uint8))


def make(out: Path, *, images: ImageSet) -> int:
    """Write the set under ``out``; returns the number of files. A finished set is kept as it is."""
    settings = json.dumps(asdict(images), sort_keys=True)
    marker = out / SETTINGS_FILE
    if marker.exists():
        if marker.read_text() != settings:
            raise SystemExit(f"{out} holds another set ({marker.read_text()}); remove it first")
        return 0
    written = sum(_make_split(out / split, split=split, images=images) for split in SPLITS)
    marker.write_text(settings)  # last: it marks the set as complete
    return written


def _make_split(folder: Path, *, split: str, images: ImageSet) -> int:
    for label, name in enumerate(class_names(images.classes)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(images.count(split)):
            rng = np.random.default_rng([images.seed, SPLITS.index(split), label, index])
            picture = draw(label, images=images, rng=rng)
            picture.save(folder / name / f"{index:05d}.jpg", quality=90)
    return images.classes * images.count(split)


def main(argv: list[str] | None = None) -> None:
    """Command line: an output folder and the fields of `ImageSet`."""
    parser = argparse.ArgumentParser(description="Make a small set of JPEG files in class folders.")
    parser.add_argument("out", type=Path, help="folder to make")
    for name, default in asdict(ImageSet()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    args = vars(parser.parse_args(argv))
    out = args.pop("out")
    print(f"{make(out, images=ImageSet(**args))} files written under {out}")


if __name__ == "__main__":
    main()
