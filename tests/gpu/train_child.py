"""A deterministic training that a test kills: prints each step, then a digest of the weights."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from checkfreq import CFCheckpoint
from tests.gpu.test_training import OPTIMIZERS, images, manager_of, network, tensor_bits

NUM_STEPS = 25


def main(chk_dir: Path, name: str) -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    model = network()
    optimizer = OPTIMIZERS[name](model)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with manager_of(chk_dir, chk) as manager:
        manager.restore()
        while manager.global_step < NUM_STEPS:
            optimizer.zero_grad()
            model(images()).square().mean().backward()
            manager.weight_update()
            manager.step()
            print(f"step {manager.global_step}", flush=True)
    bits = tensor_bits([model.state_dict(), optimizer.state_dict()], "state")
    print(hashlib.sha256(repr(sorted(bits.items())).encode()).hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
