"""State as flat names and short texts: a digest of each tensor, the value of everything small."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_128

#: A list of numbers longer than this is told by a digest.
_MOST_ITEMS = 32
_MOST_CHARACTERS = 80
_MOST_LEVELS = 8
#: How much state is read at each step; more is read every so many steps.
BYTES_PER_STEP = 64 << 20


def digest_of(text: str) -> str:
    """A digest of a text, 16 characters."""
    return xxh3_64_hexdigest(text.encode())


def tensor_text(tensor: Tensor) -> str:
    """The value of a single number, a digest of the bits of others; dtype and shape."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided or tensor.is_meta:
        return f"{tensor.dtype} {tuple(tensor.shape)}, not read"
    shape = str(list(tensor.shape))
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.numel() == 1 and not tensor.is_complex():
        return f"{kind}{shape} {tensor.item()!r}"
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    state = xxh3_128()
    state.update(plain.view(torch.uint8).numpy().data)
    return f"{kind}{shape} {state.hexdigest()[:16]}"


def flatten(value: Any, path: str, into: dict[str, str], level: int = 0) -> None:
    """Add each leaf of a tree of tensors and plain values under its path."""
    if isinstance(value, Tensor):
        into[path] = tensor_text(value)
    elif isinstance(value, dict) and level < _MOST_LEVELS:
        for key, item in dict.items(value):
            flatten(item, f"{path}.{key}", into, level + 1)
    elif isinstance(value, list | tuple) and level < _MOST_LEVELS:
        if len(value) > _MOST_ITEMS and not any(isinstance(v, Tensor | dict) for v in value):
            into[path] = f"{len(value)} items {digest_of(repr(value))}"
            return
        for number, item in enumerate(value):
            flatten(item, f"{path}.{number}", into, level + 1)
    else:
        into[path] = plain_text(value)


def plain_text(value: Any) -> str:
    """A short text of a value that is not a tensor, the same in every process."""
    if isinstance(value, str | int | float | complex | bool | bytes | None):
        text = repr(value)
        return text if len(text) <= _MOST_CHARACTERS else f"{text[:40]}... {digest_of(text)}"
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # NumPy
        size = getattr(value, "size", 0)
        if size == 1:
            return repr(value.item())
        return f"{value.dtype}{list(value.shape)} {xxh3_64_hexdigest(value.tobytes())}"
    if isinstance(value, set | frozenset):
        return f"a set of {len(value)} {digest_of(repr(sorted(map(repr, value))))}"
    return f"a {type(value).__qualname__}"


def batch_text(batch: Any) -> str:
    """A digest of a batch of any structure."""
    leaves: dict[str, str] = {}
    flatten(batch, "", leaves)
    return digest_of(repr(sorted(leaves.items())))


def generators() -> dict[str, str]:
    """Digests of the global random generators."""
    found = {
        "rng.python": digest_of(repr(random.getstate())),
        "rng.torch": tensor_text(torch.get_rng_state()).rpartition(" ")[2],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        inner = {name: plain_text(value) for name, value in state["state"].items()}
        rest = {name: value for name, value in state.items() if name != "state"}
        found["rng.numpy"] = digest_of(repr((inner, rest)))
    kind = torch.accelerator.current_accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    # Where training has not used it yet, reading would initialise it.
    if module is not None and getattr(module, "is_initialized", lambda: True)():
        for device in range(torch.accelerator.device_count()):
            text = tensor_text(module.get_rng_state(device))
            found[f"rng.{kind}:{device}"] = text.rpartition(" ")[2]
    return found


def generator_text(value: Any) -> str | None:
    """A digest of a random generator of the user's own; None for any other object."""
    kind = type(value)
    if issubclass(kind, torch.Generator):
        return "torch.Generator " + tensor_text(value.get_state()).rpartition(" ")[2]
    if issubclass(kind, random.Random):
        return "random.Random " + digest_of(repr(value.getstate()))
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.random.Generator | numpy.random.RandomState):
        bits = getattr(value, "bit_generator", None)
        state = bits.state if bits is not None else value.get_state(legacy=False)
        leaves: dict[str, str] = {}
        flatten(state, "", leaves)
        return f"numpy {type(value).__name__} " + digest_of(repr(leaves))
    return None
