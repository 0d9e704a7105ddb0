"""Ways to make a hostile checkpoint out of a valid one, by chance.

``forge`` writes other values into a manifest and digests it anew, so that it validates: whoever
sends a directory can do that too.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkfreq.store.manifest import MANIFEST_NAME, digest_of

#: Stands for text that no JSON encoder writes.
_RAW = re.compile(r'"@raw@(\d+)@"')

_NAMES = (
    *("step", "load_state_dict", "state_dict", "_is_better", "is_better", "mode_worse", "_reset"),
    *("params", "kind", "class", "tree", "device", "shape", "data", "__class__", "__dict__"),
    *("optimizer", "lr", "lr_lambdas", "_schedulers", "_step_count", "0", "-1", "$positions"),
    *("rng", "torch", "numpy", "python", "words", "gauss", "bit_generator", "pos", "key", "state"),
)
_TEXTS = (
    *("", "a", "\0", "\x1b]0;owned\x07\x1b[31m", "\ud800", "\u202e", "\n\n", "é", "a" * 5000),
    *("../../x", "/etc/passwd", "..", ".", "save", "load", "hub", "_inductor", "nn", "os"),
    *("float32", "int8", "bfloat16", "quint8", "strided", "cuda:0", "cuda:200", "meta", "cpu:9999"),
    *("privateuseone:1", "nosuch", "parameter", "inf", "-inf", "zz", "0x" + "f" * 5000, "O", "|O8"),
    *("module", "optimizer", "object", "dict", "rng", "scaler", "dcp", "<f8", "|V8", "<U2", "M8"),
)
_NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 8, 255, 624, 625, 4096, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62),
    *(2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308, 5e-324, -2.5),
)
_RAWS = (
    *("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1" * 5000, "1.0e-99999"),
    *(r'"\u0000"', r'"\ud800"', r'"\udc00\ud800"', "[" * 100_000, "[" * 900 + "]" * 900),
    *('{"a":' * 900 + "1" + "}" * 900, '{"a":1,"a":2}', "01", "'a'", ""),
)
_TAGS = (
    *("$tensor", "$ndarray", "$torch.Size", "$torch.dtype", "$torch.memory_format", "$set", "$int"),
    *("$torch.layout", "$torch.device", "$float", "$str", "$complex", "$bytes", "$bytearray"),
    *("$timedelta", "$path", "$purepath", "$range", "$ellipsis", "$dict", "$tuple", "$deque"),
    *("$OrderedDict", "$Counter", "$defaultdict", "$frozenset", "$slice", "$numpy", "$numpy.dtype"),
)


def value(chance: random.Random, depth: int = 0) -> Any:
    """Something that JSON can say, or ``@raw@`` text."""
    kind = chance.randrange(12 if depth < 3 else 6)
    if kind == 0:
        return chance.choice([None, True, False])
    if kind < 3:
        return chance.choice(_NUMBERS)
    if kind < 5:
        return chance.choice(_TEXTS + _NAMES)
    if kind == 5:
        return f"@raw@{chance.randrange(len(_RAWS))}@"
    if kind < 8:
        return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 8:
        return {chance.choice(_NAMES): value(chance, depth + 1) for _ in range(chance.randrange(4))}
    tagged = {chance.choice(_TAGS): value(chance, depth + 1)}
    while chance.random() < 0.3:
        extra = chance.choice(["device", "order", "data", "shape", "factory", "maxlen"])
        tagged[extra] = value(chance, depth + 1)
    return tagged


_Place = tuple[Any, Any]  # a container, and a key or index in it


def _places(document: Any) -> list[_Place]:
    found: list[_Place] = []
    stack = [document]
    while stack:
        node = stack.pop()
        if isinstance(node, dict | list):
            keys = node if isinstance(node, dict) else range(len(node))
            found += [(node, key) for key in keys]
            stack += [node[key] for key in keys]
    return found


def _replace(chance: random.Random, place: _Place, places: list[_Place]) -> None:
    place[0][place[1]] = value(chance)


def _same_type(chance: random.Random, place: _Place, places: list[_Place]) -> None:
    """Another value of the kind that is there, so that what comes after it is reached."""
    old = place[0][place[1]]
    pool: tuple[Any, ...] = (None,)
    if isinstance(old, bool):
        pool = (True, False)
    elif isinstance(old, int | float):
        pool = (*_NUMBERS, old + 1, old - 1, old * 2)
    elif isinstance(old, str):
        pool = (*_TEXTS, *_NAMES, old + "a", old[1:])
    elif isinstance(old, list):
        pool = ([], old[:-1], [*old, *old], [old])
    elif isinstance(old, dict):
        pool = ({}, {**old, chance.choice(_NAMES): value(chance)}, {"a": old})
    place[0][place[1]] = chance.choice(pool)


def _remove(chance: random.Random, place: _Place, places: list[_Place]) -> None:
    del place[0][place[1]]


def _add(chance: random.Random, place: _Place, places: list[_Place]) -> None:
    node = place[0]
    if isinstance(node, dict):
        node[chance.choice(_NAMES + _TEXTS)] = value(chance)
    else:
        node.insert(chance.randrange(len(node) + 1), value(chance))


def _copy(chance: random.Random, place: _Place, places: list[_Place]) -> None:
    """What is somewhere else."""
    node, key = chance.choice(places)
    place[0][place[1]] = json.loads(json.dumps(node[key]))


_EDITS: tuple[Callable[[random.Random, _Place, list[_Place]], None], ...] = (
    *(_replace, _replace, _same_type, _same_type, _same_type, _remove, _add, _add, _copy),
)


def edit(chance: random.Random, document: Any) -> None:
    """One change somewhere; rather in the objects than in the files."""
    roots = [document[name] for name in ("objects", "ranks") if document.get(name)]
    root = chance.choice([*roots, *roots, *roots, document.get("files") or document, document])
    places = _places(root)
    if places:
        chance.choice(_EDITS)(chance, chance.choice(places), places)


def text_of(document: Any) -> str:
    """JSON, with raw texts in the place of what stands for them."""
    text = json.dumps(document)
    return _RAW.sub(lambda match: _RAWS[int(match[1])], text)


def read_manifest(folder: Path) -> Any:
    return json.loads((folder / MANIFEST_NAME).read_bytes())


def write_manifest(folder: Path, document: Any, *, version: int | None = None) -> None:
    """Write a manifest whose own digest is right."""
    body = {name: inner for name, inner in document.items() if name != "digest"}
    said = body.pop("format_version", 1)
    head = f'{{"format_version": {said if version is None else version}, "digest": "'.encode()
    tail = b'",\n' + text_of(body)[1:].encode("utf-8", "surrogatepass") + b"\n"
    digest = digest_of(head, b"0" * 16, tail).encode()
    (folder / MANIFEST_NAME).write_bytes(head + digest + tail)


def _forge_state(chance: random.Random, folder: Path) -> None:
    document = read_manifest(folder)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        edit(chance, document)
    write_manifest(folder, document, version=chance.choice([None] * 20 + [0, 1, 2, 3, 999999999]))


def _forge_payload(chance: random.Random, folder: Path) -> None:
    """Other bytes under right digests: generators' states, counters, indices."""
    document = read_manifest(folder)
    for file in chance.choices([f for f in document["files"] if f["tensors"]], k=2):
        tensor = chance.choice(file["tensors"])
        data = bytearray((folder / file["name"]).read_bytes())
        start, size = tensor["offset"], tensor["num_bytes"]
        for _ in range(chance.choice([1, 1, 8])) if size else ():
            data[start + chance.randrange(size)] = chance.choice([0, 1, 127, 128, 255])
        if chance.random() < 0.3:
            data[start : start + size] = chance.choice([bytes(size), b"\xff" * size])
        (folder / file["name"]).write_bytes(data)
        tensor["digest"] = digest_of(memoryview(data)[start : start + size])
    write_manifest(folder, document)


_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "int32": 4, "float32": 4, "int64": 8}


def _forge_layout(chance: random.Random, folder: Path) -> None:
    """Another dtype or shape over the same bytes, a name of another tensor, a hole in a file."""
    document = read_manifest(folder)
    file = chance.choice([f for f in document["files"] if f["tensors"]])
    tensor = chance.choice(file["tensors"])
    kind = chance.randrange(4)
    if kind == 0:
        dtype = chance.choice([*_ITEM_BYTES])
        tensor["dtype"] = dtype
        tensor["shape"] = [tensor["num_bytes"] // _ITEM_BYTES[dtype]]
    elif kind == 1:
        tensor["shape"] = chance.choice([[1], [2**62, 0], []]) + tensor["shape"]
    elif kind == 2:
        other = chance.choice(file["tensors"])
        tensor["name"], other["name"] = other["name"], tensor["name"]
    else:
        more = chance.choice([1, 2**20, 2**40, 2**60])
        last = max(file["tensors"], key=lambda t: (t["offset"], t["num_bytes"]))
        last["dtype"], last["num_bytes"] = "uint8", last["num_bytes"] + more
        last["shape"] = [last["num_bytes"]]
        file["num_bytes"] += more
        if more <= 2**20:
            os.truncate(folder / file["name"], file["num_bytes"])
    write_manifest(folder, document)


def forge(chance: random.Random, folder: Path) -> None:
    """A manifest that says something else and validates."""
    chance.choice([_forge_state] * 6 + [_forge_payload, _forge_layout])(chance, folder)
