"""What the runs of other libraries' loops learn: tiny data and models, random in all ways."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

NUM_SAMPLES = 46  # which no group of batches divides
WORDS = 64


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of 6 words, of which the first is the sample's number; one word is replaced at
    random, so that all three global generators have their part in what is learnt."""

    def __init__(self, num_samples: int = NUM_SAMPLES, *, is_random: bool = True) -> None:
        self._is_random = is_random
        generator = torch.Generator().manual_seed(5)
        self._words = torch.randint(0, WORDS, (num_samples, 6), generator=generator)
        self._words[:, 0] = torch.arange(num_samples)

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sentence, as a model of transformers wants it."""
        words = self._words[index].clone()
        if not self._is_random:
            return {"input_ids": words, "labels": words.clone()}
        words[random.randrange(1, 6)] = int(np.random.randint(WORDS))
        words[1] = torch.randint(0, WORDS, ())
        return {"input_ids": words, "labels": words.clone()}


class Bag(nn.Module):
    """No model of transformers': an embedding, batch norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(12, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Predicts the last word."""
        scores = self.out(self.drop(self.norm(self.embed(input_ids[:, :-1]).mean(1))))
        return {"loss": nn.functional.cross_entropy(scores, labels[:, -1]), "logits": scores}


class Language(nn.Module):
    """A transformer's block with dropout; its loss is divided by a number that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
        self.out = nn.Linear(16, WORDS)

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        """Predicts each next word."""
        scores = self.out(self.block(self.embed(input_ids)))
        loss = nn.functional.cross_entropy(
            scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        return {"loss": loss / (num_items_in_batch or labels[:, 1:].numel()), "logits": scores}
