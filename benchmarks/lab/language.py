"""BERT and GPT-2 from transformers' classes, with random weights: nothing is downloaded.

``small`` models have the same layers, but fewer and narrower, for a CPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from checkfreq.examples.imagenet.models import import_torchvision

#: Name -> the sizes of its configuration; "bert" is BERT-large, "gpt2" the smallest GPT-2.
LANGUAGE_MODELS: dict[str, dict[str, int]] = {
    "bert": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "gpt2": {},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
}

#: The fraction of BERT's tokens that is masked; the loss is over these.
MASKED = 0.15
#: A target that the loss ignores.
IGNORED = -100

_SMALL_VOCABULARY = 8192
_SMALL_BERT = {
    "vocab_size": _SMALL_VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
_SMALL_GPT2 = {
    "vocab_size": _SMALL_VOCABULARY,
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Language(nn.Module):
    """int64 tokens [N, L] to logits [N, L, V]. Raises ImportError without transformers."""

    def __init__(self, name: str, *, small: bool) -> None:
        super().__init__()
        self.is_masked = name == "bert"
        self.core = _bert(name, small=small) if self.is_masked else _gpt2(name, small=small)
        self.vocabulary: int = self.core.config.vocab_size

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each (GPT-2), or of each masked one (BERT)."""
        logits: torch.Tensor = self.core(tokens).logits
        return logits

    def batch(self, batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random inputs [batch, tokens] and flat targets [batch * tokens], on torch's device."""
        drawn = torch.randint(1, self.vocabulary, (batch, tokens + 1))
        inputs, target = drawn[:, :-1], drawn[:, 1:]
        if self.is_masked:
            is_masked = torch.rand(inputs.shape) < MASKED
            target = torch.where(is_masked, inputs, IGNORED)
            inputs = torch.where(is_masked, 0, inputs)
        return inputs.contiguous(), target.flatten()


def _transformers() -> Any:
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()  # transformers imports it, and its operators may be missing
    import transformers

    return transformers


def _bert(name: str, *, small: bool) -> Any:
    transformers = _transformers()
    sizes = _SMALL_BERT if small else LANGUAGE_MODELS[name]
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def _gpt2(name: str, *, small: bool) -> Any:
    transformers = _transformers()
    sizes = _SMALL_GPT2 if small else LANGUAGE_MODELS[name]
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))
