"""A GAN: two models and two optimizers, both stepped in each iteration.

With several optimizers, ``weight_update`` is told which one to step. The boundary comes when the
loop asks for the next batch, so a checkpoint holds both models after the same iteration.

    python -m checkfreq.examples.gan chk/
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from iterators.testing import digest

EPOCHS = 8


def main(chk_dir: str) -> None:
    torch.manual_seed(0)
    angles = 2 * torch.pi * torch.rand(2048)
    data = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))  # points on a circle
    loader = DataLoader(data, batch_size=32, shuffle=True)
    generator = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1))
    generator_steps = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    critic_steps = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))

    tracked = {"generator": generator, "generator_steps": generator_steps}
    chk = CFCheckpoint(**tracked, critic=critic, critic_steps=critic_steps)
    with CFManager(chk_dir, chk) as cf_manager:
        train_loader = CFIterator(loader, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(EPOCHS):
            for (real,) in train_loader:
                ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
                fake = generator(torch.randn(len(real), 8))

                critic_loss = bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
                critic_loss.backward()
                cf_manager.weight_update(critic_steps)
                critic_steps.zero_grad()

                loss = bce(critic(fake), ones)
                loss.backward()
                cf_manager.weight_update(generator_steps)
                generator_steps.zero_grad()
                critic_steps.zero_grad()  # what the generator's loss left in the critic
            print(f"epoch {epoch}: {loss.item():.6f} against {critic_loss.item():.6f}")
    states = [one.state_dict() for one in (generator, critic, generator_steps, critic_steps)]
    print("digest", digest(states))


if __name__ == "__main__":
    main(sys.argv[1])
