"""Crop windows as torchvision draws them, and the ready pipelines made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn, pipeline_def
from PIL import Image, ImageOps

from iterators import CFIterator
from iterators.dali import DALILoader, FileReader, imagenet_train, imagenet_val
from iterators.dali.crops import NUM_UNIFORMS, TRIES, random_window
from iterators.testing import check_resumable, walk

Window = tuple[int, int, int, int]
Range = tuple[float, float]

RANGES: list[tuple[Range, Range, set[bool]]] = [
    ((0.08, 1.0), (3 / 4, 4 / 3), {True, False}),
    ((0.9, 1.0), (0.3, 0.4), {False}),
    ((0.9, 1.0), (3.0, 4.0), {False}),
]


def torchvisions_window(
    uniforms: np.ndarray, height: int, width: int, scale: Range, ratio: Range
) -> tuple[Window, bool]:
    """``RandomResizedCrop.get_params`` with given uniforms: (top, left, height, width), found.

    The limits are in single precision, as DALI keeps constants.
    """

    def single(value: float) -> float:
        return float(np.float32(value))

    draws = uniforms.astype(np.float64)
    low, high = np.log(ratio)
    for attempt in range(TRIES):
        share = single(scale[0]) + draws[attempt] * single(scale[1] - scale[0])
        aspect = np.exp(single(low) + draws[TRIES + attempt] * single(high - low))
        area = height * width * share
        w, h = rounded(np.sqrt(area * aspect)), rounded(np.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(draws[2 * TRIES] * (height - h + 1))
            left = int(draws[2 * TRIES + 1] * (width - w + 1))
            return (top, left, h, w), True
    h, w = height, width
    if width / height < single(ratio[0]):
        h = rounded(width / single(ratio[0]))
    elif width / height > single(ratio[1]):
        w = rounded(height * single(ratio[1]))
    return ((height - h) // 2, (width - w) // 2, h, w), False


def rounded(value: float) -> int:
    return int(np.floor(value + 0.5))


@pytest.mark.parametrize(("scale", "ratio", "expected"), RANGES)
def test_windows_are_torchvisions_and_cut_the_upright_image(
    paths: list[str], scale: Range, ratio: Range, expected: set[bool]
) -> None:
    reader = FileReader(
        files=paths * 4, num_uniforms=NUM_UNIFORMS, outputs=("id", "uniforms"), seed=3
    )

    @pipeline_def(batch_size=32, num_threads=1, device_id=None)
    def define() -> Any:
        encoded, ids, uniforms = reader()
        start, shape = random_window(encoded, uniforms, scale=scale, ratio=ratio)
        cut = fn.decoders.image_slice(encoded, start=start, shape=shape, axes=[0, 1])
        return ids, uniforms, start, shape, fn.decoders.image(encoded), cut

    found = set()
    pipe = define()
    for outputs in (pipe.run() for _ in range(5)):
        for sample in range(len(outputs[0])):
            one, drawn, start, shape, whole, cut = (np.array(out[sample]) for out in outputs)
            with Image.open((paths * 4)[int(one[0])]) as opened:
                width, height = ImageOps.exif_transpose(opened).size
            window, fits = torchvisions_window(drawn, height, width, scale, ratio)
            assert (*start.tolist(), *shape.tolist()) == window
            top, left, h, w = window
            assert np.array_equal(cut, whole[top : top + h, left : left + w])
            found.add(fits)
    assert found == expected


def train(images: Path, batch: int, **settings: Any) -> DALILoader:
    return imagenet_train(images, batch, image_size=16, num_threads=1, **settings)


def val(images: Path, batch: int, **settings: Any) -> DALILoader:
    return imagenet_val(images, batch, image_size=14, num_threads=1, **settings)


def test_training_and_validation_resume_from_every_state(images: Path) -> None:
    check_resumable(lambda: CFIterator(train(images, 16, seed=2)), epochs=1)
    check_resumable(lambda: CFIterator(val(images, 16)), epochs=1)
    served = walk(CFIterator(val(images, 16)), epochs=1)
    assert [one for batch in served for one in batch.ids or ()] == list(range(40))


def test_batches_are_normalised_and_labelled(images: Path) -> None:
    for loader, size in ((train(images, 8), 16), (val(images, 8), 14)):
        delivery = next(loader.open(epoch=0, start=0))
        (batch,) = delivery.data
        assert batch["data"].shape == (8, 3, size, size)
        assert batch["data"].dtype == torch.float32
        assert abs(float(batch["data"].mean())) < 1
        assert batch["label"].shape == (8, 1)
        folders = [int(loader.name_of(int(one)).split("/")[0][-1]) for one in delivery.ids]
        assert batch["label"].flatten().tolist() == folders


def test_validation_is_resize_and_centre_crop(tmp_path: Path) -> None:
    """As Pillow does it, up to rounding: levels of 0 to 255 differ by less than one on average."""
    sizes = [(90, 130), (131, 90), (40, 40)]
    (tmp_path / "class").mkdir()
    for index, (height, width) in enumerate(sizes):
        y, x = np.mgrid[:height, :width]
        pixels = np.stack([x + y, 2 * y % 256, x * y % 64], axis=-1).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "class" / f"{index}.png")
    loader = imagenet_val(tmp_path, 1, image_size=28, num_threads=1)
    for delivery, (height, width) in zip(loader.open(epoch=0, start=0), sizes, strict=True):
        share = 32 / min(height, width)
        size = (rounded(share * width), rounded(share * height))
        with Image.open(tmp_path / loader.name_of(int(delivery.ids[0]))) as opened:
            resized = np.asarray(opened.resize(size, Image.Resampling.BILINEAR))
        left, top = (rounded((side - 28) / 2) for side in size)
        found = delivery.data[0]["data"][0].permute(1, 2, 0).numpy()
        mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        levels = (found * deviation + mean) * 255
        assert np.abs(levels - resized[top : top + 28, left : left + 28]).mean() < 1


def test_pictures_are_flipped_or_not(images: Path) -> None:
    loader = train(images, 1, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    pictures: dict[str, list[torch.Tensor]] = {}
    for delivery in (one for epoch in range(4) for one in loader.open(epoch=epoch, start=0)):
        name = loader.name_of(int(delivery.ids[0]))
        pictures.setdefault(name, []).append(delivery.data[0]["data"])
    square = [name for name in pictures if int(Path(name).stem) % 5 == 2]
    flipped = 0
    for first, *others in (pictures[name] for name in square):
        for other in others:
            same, mirrored = torch.equal(other, first), torch.allclose(other, first.flip(3))
            assert same != mirrored
            flipped += mirrored
    assert 0 < flipped < 3 * len(square)


def test_decoding_on_a_gpu_needs_to_know_which(images: Path) -> None:
    with pytest.raises(ValueError, match="give device_id, the local rank"):
        imagenet_train(images, 4, device="mixed")
    with pytest.raises(ValueError, match="device must be 'cpu' or 'mixed', got 'gpu'"):
        imagenet_val(images, 4, device="gpu")
