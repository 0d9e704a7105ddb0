"""States of a given size, for benchmarks that need no real model."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.lab.saver import Training
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast

NUM_TENSORS = 64
_WIDTH = 4096
_ADAMW = ("exp_avg", "exp_avg_sq", "step")


class Block(nn.Module):
    """``NUM_TENSORS`` float32 parameters of ``num_bytes`` in all."""

    def __init__(
        self,
        num_bytes: int,
        *,
        num_tensors: int = NUM_TENSORS,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        count = num_bytes // num_tensors // 4
        parts = (torch.rand(count, device=device) for _ in range(num_tensors))
        self.parts = nn.ParameterList(parts)

    def state_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def change(self) -> None:
        """Write to every parameter, as a weight update does."""
        with torch.no_grad():
            for part in self.parts:
                part.add_(1.0)


def manual_manager(folder: str, block: Block) -> CFManager:
    """A manager that saves on request and keeps one checkpoint."""
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    return CFManager(
        folder,
        CFCheckpoint(model=block, optimizer=optimizer),
        mode=CFMode.MANUAL,
        chk_freq=0,
        retention=KeepLast(1),
        config=CFConfig(),
    )


def adamw_training(num_bytes: int, *, num_tensors: int, device: torch.device) -> Training:
    """Parameters and both moments of AdamW: ``num_bytes`` of float32 in all, after one step.

    No gradients are kept.
    """
    block = Block(num_bytes // 3, num_tensors=num_tensors, device=device)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-6)
    for part in block.parameters():
        part.grad = torch.randn_like(part)
    optimizer.step()
    optimizer.zero_grad()
    return Training(block, optimizer)


def write_to_all(training: Training) -> None:
    """Write to every parameter and every moment, and count the step, as a weight update does."""
    parts = list(training.model.parameters())
    entries = [training.optimizer.state[part] for part in parts]
    with torch.no_grad():
        for tensors in (parts, *([one[name] for one in entries] for name in _ADAMW)):
            torch._foreach_add_(tensors, 1.0)


def num_steps(training: Training) -> int:
    """The number of steps that its optimizer counted."""
    return int(training.optimizer.state[next(training.model.parameters())]["step"])


def fingerprint(training: Training) -> tuple[int, ...]:
    """The steps, and the sums of the bits, as integers, of the last parameter and its moments."""
    *_, last = training.model.parameters()
    moments = training.optimizer.state[last]
    tensors = (last.detach(), moments["exp_avg"], moments["exp_avg_sq"])
    sums = (int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in tensors)
    return num_steps(training), *sums


class Perceptron:
    """A training without a loader, on the same batch every time; parameters and momentum."""

    def __init__(self, state_bytes: int, *, batch: int, device: torch.device) -> None:
        layers = max(1, round(state_bytes / 2 / 4 / _WIDTH**2))
        self.device = device
        self.model = nn.Sequential(
            *(nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(layers))
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9)
        self.batch = torch.randn(batch, _WIDTH, device=device)

    def backward(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.batch).square().mean().backward()

    def synchronize(self) -> None:
        """Wait for the device, if there is one to wait for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
