"""A loop with batches of its own and no CFIterator: ``cf_manager.step()`` is the boundary.

Batches are drawn at random from a long text, as in training from a memory-mapped file. They come
from torch's generator, which every checkpoint holds, so a resumed run draws the same ones.

    python -m checkfreq.examples.own_loader chk/
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from iterators.testing import digest

STEPS = 1200


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    text = torch.randint(0, 64, (100_000,)).cumsum(0) % 64
    model = nn.Sequential(nn.Embedding(64, 32), nn.Dropout(0.1), nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with CFManager(chk_dir, chk) as cf_manager:
        cf_manager.restore()
        while cf_manager.global_step < STEPS:
            starts = torch.randint(len(text) - 17, (32, 1))
            batch = text[starts + torch.arange(17)]
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            cf_manager.weight_update()
            optimizer.zero_grad()
            cf_manager.step()  # once per update, when everything that belongs to it is done
            if cf_manager.stopped:  # told to stop, and the last checkpoint is durable
                sys.exit(75)
            if cf_manager.global_step % 200 == 0:
                print(f"step {cf_manager.global_step}: loss {loss.item():.6f}")
    print("digest", digest([model.state_dict(), optimizer.state_dict()]))


if __name__ == "__main__":
    main(sys.argv[1])
