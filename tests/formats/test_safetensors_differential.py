"""Generated safetensors files, valid and hostile, read by us and by the safetensors library.

What the library refuses is refused here, and what both read is the same bits. A header that repeats
a key or has fields of its own is refused by us alone.
"""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from checkfreq.errors import CorruptCheckpointError
from checkfreq.formats.safetensors_file import Form, SafetensorsFile
from checkfreq.snapshot.layout import safetensors_form
from checkfreq.state.tensors import DTYPES
from tests.formats.support import same

#: What the library takes in a header, and how many bits a value has.
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32},
    **{"I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
}
_NAMES = ["a", "b", "é", "x.y", "", "\U0001f600", "\x00"]
_NUMBERS = [
    *(b"-0", b"-1", b"1.0", b"1e0", b"01", b"true", b"null", b'"1"', b"NaN"),
    *(b"18446744073709551615", b"9223372036854775808", b"4611686018427387904"),
]
_ODD = [
    *(*_NUMBERS, b"[]", b"{}", b'"\\ud800"', b'"\\ud83d\\ude00"', b'"U8"', b"\xef\xbb\xbf"),
    *(b"\xff", b"\xed\xa0\x80", b" ", b"\n", b"\x00", b",", b":", b"//", b"'"),
]
_ENCODINGS = ["utf-16", "utf-8-sig", "utf-32", "utf-16-le"]
_OURS_ALONE = re.compile("a key is there twice|expected dtype, shape and data_offsets")


def _header(chance: random.Random) -> tuple[bytes, bytes]:
    """A valid header and its data, but for half a byte here and there."""
    header: dict[str, object] = (
        {"__metadata__": {"k": "v", "é": ""}} if chance.random() < 0.5 else {}
    )
    end = 0
    for number in range(chance.randrange(4)):
        dtype, shape = chance.choice([*_BITS]), [chance.choice([0, 1, 2, 2, 3, 4])]
        shape = chance.choice([[], shape, shape * 2, [*shape, 2]])
        num_bytes = _BITS[dtype] * torch.Size(shape).numel() // 8
        place = [end, end := end + num_bytes]
        name = f"{chance.choice(_NAMES)}{number}"
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
    text = json.dumps(header, ensure_ascii=chance.random() < 0.5).encode()
    return text + b" " * chance.choice([0, 3]), chance.randbytes(end)


def _spoil(chance: random.Random, text: bytes, data: bytes) -> tuple[bytes, bytes]:
    at = chance.randrange(len(text) + 1)
    values = [*re.finditer(rb'-?\d+|"[^"]*"|\[[^\]]*\]', text)]
    kind = chance.randrange(8)
    if kind == 0:
        text = text[:at] + chance.choice(_ODD) + text[at:]
    elif kind in (1, 2) and values:
        value = chance.choice(values)
        text = text[: value.start()] + chance.choice(_ODD) + text[value.end() :]
    elif kind == 3:
        text = text.decode("utf-8", "replace").encode(chance.choice(_ENCODINGS))
    elif kind == 4:
        data = chance.choice([data + b"x", data[:-1]])
    elif kind == 5:
        other = chance.choice([b'"dtyp"', b'"dtype":"U8","dtype"', b'"x":1,"dtype"'])
        text = text.replace(b'"dtype"', other, 1)
    elif kind == 6:
        text = text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
    else:
        text = text[:at] + text[at + 1 :]
    return text, data


def _by_the_library(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]] | str:
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in sorted(file.keys())}, file.metadata() or {}
    except (SafetensorError, TypeError) as error:  # TypeError: a shape that torch cannot have
        return str(error)


def _by_us(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]] | str:
    try:
        file = SafetensorsFile.open(path)
        return {key: file.read(key) for key in file.forms}, file.metadata
    except CorruptCheckpointError as error:
        return str(error)


@pytest.mark.parametrize("num_cases", [150, pytest.param(2000, marks=pytest.mark.more)])
@pytest.mark.parametrize("kind", ["valid", "hostile"])
def test_we_read_what_the_library_reads_and_refuse_what_it_refuses(
    kind: str, num_cases: int, tmp_path: Path
) -> None:
    path, num_read = tmp_path / "case.safetensors", 0
    for case in range(num_cases):
        chance = random.Random(f"{kind} {case}")
        text, data = _header(chance)
        length = len(text)
        if kind == "hostile":
            for _ in range(chance.choice([1, 1, 2, 3])):
                text, data = _spoil(chance, text, data)
            length = max(0, len(text) + chance.choice([0, 0, 0, 0, 1, -1]))
        path.write_bytes(struct.pack("<Q", length) + text + data)
        theirs, ours = _by_the_library(path), _by_us(path)
        if isinstance(theirs, str):
            assert isinstance(ours, str), f"{case}: {text!r}: the library says {theirs}"
        elif isinstance(ours, str):
            assert kind == "hostile", f"{case}: {text!r}: {ours}"
            assert _OURS_ALONE.search(ours), f"{case}: {text!r}: {ours}"
        else:
            num_read += 1
            assert same(ours, theirs), f"{case}: {text!r}"
    assert num_read > num_cases // 40


@pytest.mark.parametrize("shape", [(2, 3), ()])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_dtype_has_the_name_that_the_library_gives_it(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    num_bytes = Form("a", dtype, shape).num_bytes
    tensor = torch.arange(num_bytes, dtype=torch.uint8).view(dtype).reshape(shape)
    try:
        file = save({"a": tensor})
    except (KeyError, SafetensorError):  # it has no name for it
        assert safetensors_form(dtype, shape)[0] == "U8"
        return
    (length,) = struct.unpack("<Q", file[:8])
    entry = json.loads(file[8 : 8 + length])["a"]
    assert safetensors_form(dtype, shape) == (entry["dtype"], entry["shape"])
    (tmp_path / "a.safetensors").write_bytes(file)
    assert same(SafetensorsFile.open(tmp_path / "a.safetensors").read("a"), tensor)
