"""States of a given size, for benchmarks of the machinery rather than of a model."""

from __future__ import annotations

import torch
from torch import nn

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast

NUM_TENSORS = 64


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
    """A manager that saves when told to, and keeps one checkpoint."""
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    return CFManager(
        folder,
        CFCheckpoint(model=block, optimizer=optimizer),
        mode=CFMode.MANUAL,
        chk_freq=0,
        retention=KeepLast(1),
        config=CFConfig(),
    )
