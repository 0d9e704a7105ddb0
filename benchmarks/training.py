"""Small training loops whose iterations are short and whose state is not: for measuring overhead.

The precision that a second of measuring gives does not depend on how long an iteration is, but
the shorter it is, the more checkpoints there are in that second.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from torch import nn

from benchmarks.models import build
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast

MODELS = ("resnet18", "transformer")

_CLASSES = 10
_BATCHES = 16  # made once; training takes them in turn


def add_loop_options(parser: argparse.ArgumentParser) -> None:
    """What to train, and with how many threads."""
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of torch")


class Decoder(nn.Module):
    """A causal transformer of 9 million parameters; int64 tokens [N, L] to logits [N, L, V]."""

    def __init__(self, *, vocabulary: int = 8192, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Loop:
    """Trains one of `MODELS` on batches generated once; every run of a seed is the same."""

    def __init__(self, name: str, *, batch: int, image_size: int = 32, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        if name == "transformer":
            self.model = Decoder()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
            tokens = [torch.randint(0, 8192, (batch, 33)) for _ in range(_BATCHES)]
            data = [(each[:, :-1], each[:, 1:].flatten()) for each in tokens]
        else:
            self.model = build(name, num_classes=_CLASSES)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
            shape = (batch, 3, image_size, image_size)
            data = [
                (torch.randn(shape), torch.randint(0, _CLASSES, (batch,))) for _ in range(_BATCHES)
            ]
        self._batches = itertools.cycle(data)
        self._criterion = nn.CrossEntropyLoss()

    def iterate(self) -> None:
        """One batch: forward, backward, update."""
        inputs, target = next(self._batches)
        self.optimizer.zero_grad()
        output = self.model(inputs)
        self._criterion(output.flatten(end_dim=-2), target).backward()
        self.optimizer.step()

    def synchronize(self) -> None:
        """Wait for the device; to be called before a clock is read."""

    def manager(
        self,
        folder: Path,
        *,
        interval: int | None = None,
        max_overhead: float = 0.035,
        dynamic: bool = True,
    ) -> CFManager:
        """A manager of this loop: AUTO, or MANUAL with an ``interval``. It catches no signals."""
        return CFManager(
            folder,
            CFCheckpoint(model=self.model, optimizer=self.optimizer),
            mode=CFMode.AUTO if interval is None else CFMode.MANUAL,
            chk_freq=interval,
            max_overhead=max_overhead,
            dynamic=dynamic,
            retention=KeepLast(2),
            config=CFConfig(stop_signals=()),
        )
