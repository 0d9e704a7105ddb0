"""DALI decoding on the GPU, and a share of the data held there: resumed as on the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from iterators import CFIterator, ResidentDataset, ResumableDataLoader
from iterators.testing import check_resumable, walk

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty images in two class folders."""
    image = pytest.importorskip("PIL.Image")
    root, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for index in range(20):
        (root / f"c{index % 2}").mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (40 + index, 60, 3), dtype=np.uint8)
        image.fromarray(pixels).save(root / f"c{index % 2}" / f"{index}.jpg")
    return root


@pytest.mark.dali
def test_mixed_decoding_resumes_from_every_state(folder: Path) -> None:
    pytest.importorskip("nvidia.dali")
    from iterators.dali import imagenet_train

    def make() -> CFIterator:
        return CFIterator(
            imagenet_train(folder, 6, image_size=32, device="mixed", device_id=0, num_threads=2)
        )

    (batch,) = next(iter(make()))
    assert batch["data"].is_cuda
    assert check_resumable(make) > 4


@pytest.mark.dali
def test_the_order_is_that_of_the_host(folder: Path) -> None:
    pytest.importorskip("nvidia.dali")
    from iterators.dali import imagenet_train

    served = [
        [one.ids for one in walk(CFIterator(imagenet_train(folder, 6, **place)), epochs=2)]
        for place in ({"device": "cpu"}, {"device": "mixed", "device_id": 0})
    ]
    assert served[0] == served[1]


def test_a_share_on_the_gpu_resumes_from_every_state() -> None:
    data = [(torch.full((3,), float(index)), index) for index in range(11)]

    def make() -> CFIterator:
        share = ResidentDataset(data, rank=0, world=1, device="cuda")
        loader = ResumableDataLoader(share, 4, shuffle=True, collate_fn=ResidentDataset.collate)
        return CFIterator(loader)

    images, _ = next(iter(make()))
    assert images.is_cuda
    assert check_resumable(make) > 4
