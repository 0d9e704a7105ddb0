"""NVIDIA DALI on the CPU: a pipeline of your own, with random augmentation.

``FileReader`` replaces ``fn.readers.file``. The random numbers for augmentation come out of it as
data, ``num_uniforms`` of them in [0, 1) for each sample, so they depend on the seed, the epoch and
the sample alone. A few small images are made in ``images/`` first.

    python -m checkfreq.examples.dali chk/ images/
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator
from PIL import Image
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from iterators.dali import FileReader
from iterators.testing import digest

EPOCHS = 12
NUM_IMAGES = 256


def make_images(folder: Path) -> None:
    """Noise, darker in one class than in the other."""
    numbers = np.random.default_rng(0)
    for index in range(NUM_IMAGES):
        path = folder / f"class{index % 2}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = numbers.integers(0, 200 + 50 * (index % 2), (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)


def pictures(folder: Path) -> DALIGenericIterator:
    reader = FileReader(file_root=folder, num_uniforms=1)

    @pipeline_def(batch_size=8, num_threads=1, device_id=None)
    def pipeline() -> Any:
        encoded, label, uniforms = reader(name="Reader")
        images = fn.resize(fn.decoders.image(encoded), size=[16, 16])
        mirror = fn.cast(uniforms[0] < 0.5, dtype=types.INT32)
        return fn.crop_mirror_normalize(images, mirror=mirror, std=[255.0]), label

    return DALIGenericIterator([pipeline()], ["data", "label"])


def main(chk_dir: str, images: str) -> None:
    torch.manual_seed(0)
    if not Path(images).exists():
        make_images(Path(images))
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(pictures(Path(images)), cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(EPOCHS):
            for (batch,) in train_loader:
                loss = nn.functional.cross_entropy(
                    model(batch["data"]), batch["label"][:, 0].long()
                )
                loss.backward()
                cf_manager.weight_update()
                optimizer.zero_grad()
            print(f"epoch {epoch}: last loss {loss.item():.6f}")
    print("digest", digest([model.state_dict(), optimizer.state_dict()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
