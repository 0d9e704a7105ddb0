"""A deterministic training that a test kills: prints each step, then a digest of the state.

With ``--reference`` nothing is checkpointed, and a digest of the state is printed for each step.
The host never waits for the device before the last step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkfreq import CFCheckpoint
from tests.gpu.test_training import (
    OPTIMIZERS,
    cloned,
    digest_of,
    images,
    manager_of,
    network,
)

NUM_STEPS = 25
#: Cycles of work in front of each update: it is still queued when its boundary is passed.
BEHIND = 20_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("chk_dir", type=Path)
    parser.add_argument("name", choices=OPTIMIZERS)
    parser.add_argument("--reference", action="store_true")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    model = network()
    optimizer = OPTIMIZERS[args.name](model)

    def iterate(update: Callable[[], Any]) -> None:
        optimizer.zero_grad()
        model(images()).square().mean().backward()
        torch.cuda._sleep(BEHIND)
        update()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    if args.reference:
        states = []
        for _ in range(NUM_STEPS):
            iterate(optimizer.step)
            states.append(cloned(state()))
        for one in states:
            print(digest_of(one))
    else:
        chk = CFCheckpoint(model=model, optimizer=optimizer)
        with manager_of(args.chk_dir, chk) as manager:
            manager.restore()
            while manager.global_step < NUM_STEPS:
                iterate(manager.weight_update)
                manager.step()
                print(f"step {manager.global_step}", flush=True)
    print(digest_of(state()))


if __name__ == "__main__":
    main()
