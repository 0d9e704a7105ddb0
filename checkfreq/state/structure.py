"""The structure of the state that all ranks must share: names, dtypes, shapes, placements.

A rank's own state is left out. Ranks compare digests, and listings only if those differ.
"""

from __future__ import annotations

from xxhash import xxh3_64_hexdigest

from checkfreq.state.captured import CapturedState
from checkfreq.state.tensors import DTYPE_NAMES


def structure_digest(captured: CapturedState) -> str:
    """Equal on all ranks if, and only if, ``structure_listing`` is; "" on one rank."""
    if captured.whole is None:
        return ""
    return xxh3_64_hexdigest("\n".join(_lines(captured)).encode())


def structure_listing(captured: CapturedState) -> dict[str, str]:
    """What every name stands for, in words: "model.weight" -> "float32[8, 3]"."""
    if captured.whole is None:
        return {}
    return dict(line.split("\t", 1) for line in _lines(captured))


def _lines(captured: CapturedState) -> list[str]:
    """A line "name<tab>text" per object, tensor and tied name, sorted by nothing but order."""
    everything = captured.whole
    assert everything is not None
    lines, refs = [], everything.refs
    own = everything.own_tensors
    for name, (begin, end) in everything.spans.items():
        if name in everything.own_objects:
            continue
        lines.append(f"{name}\t{everything.objects[name].get('class', '')}")
        cuts = everything.cuts
        for index in range(begin, end):
            _, key, tensor, settled = refs[index]
            if own and (name, key) in own:
                lines.append(f"{name}.{key}\tof each rank")
                continue
            cut = cuts.get(index) if cuts else None
            shape = list(tensor.shape) if cut is None else list(cut.shape)
            text = f"{name}.{key}\t{DTYPE_NAMES[tensor.dtype]}{shape}"
            if captured.is_split and not settled:  # who writes it depends on that
                text += " volatile"
            lines.append(text if cut is None else f"{text} {cut.text}")
        lines += [
            f"{name}.{a}\tthe same as {k}" for a, k in everything.aliases.get(name, {}).items()
        ]
    return lines
