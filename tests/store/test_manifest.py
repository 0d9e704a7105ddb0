"""The commit record: it is decoded as it was encoded, and nothing malformed is accepted."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.errors import ConfigError, CorruptCheckpointError
from checkfreq.store.digests import DIGEST_DIGITS, piece_bytes_of, piece_bytes_of_shard
from checkfreq.store.manifest import (
    STATE_BYTES,
    FileEntry,
    Manifest,
    ManifestError,
    TensorEntry,
    digest_of,
    most_bytes,
)

DIGEST = "0123456789abcdef"

WEIGHT = TensorEntry("weight", "float32", (2, 3), 4096, 24, DIGEST)
EMPTY = TensorEntry("empty", "int64", (0, 5), 4120, 0, DIGEST)
SCALAR = TensorEntry("scalar", "bfloat16", (), 4120, 2, DIGEST)
MODEL = FileEntry("model.safetensors", 4122, 4096, DIGEST, (SCALAR, WEIGHT, EMPTY))
MANIFEST = Manifest(
    1200, "a-1", 1, 1700000000.25, {"torch": "2.13"}, (MODEL,), {"optimizer": {"lr": [0.1, None]}}
)
#: Two pieces: 16 bytes, and the 8 that are left.
CUT = TensorEntry("cut", "float32", (2, 3), 4096, 24, DIGEST + DIGEST[::-1], 16)
IN_PIECES = replace(MANIFEST, files=(FileEntry("cut.safetensors", 4120, 4096, DIGEST, (CUT,)),))
RANKS = {1: {"rng": {"seed": 1}}, 0: {"rng": {"seed": 0}, "$positions": [3]}}
OF_RANKS = replace(MANIFEST, world=3, ranks=RANKS)


def framed(body: str, *, version: str = "1") -> bytes:
    """A manifest with this text after its first line and the digest that belongs to it."""
    head, tail = f'{{"format_version": {version}, "digest": "', f'",\n{body}'
    digest = digest_of(head.encode(), b"0" * 16, tail.encode(errors="surrogateescape"))
    return (head + digest + tail).encode(errors="surrogateescape")


def body_of(manifest: Manifest) -> dict[str, Any]:
    """The fields after the first line, as JSON values to damage."""
    fields: dict[str, Any] = json.loads(manifest.encode())
    del fields["format_version"], fields["digest"]
    return fields


def encoded(fields: dict[str, Any], *, version: str = "1") -> bytes:
    return framed(json.dumps(fields)[1:], version=version)


@pytest.mark.parametrize("odd", [{"kind": "list"}, {"composed": {}}])
def test_state_that_older_readers_would_take_for_damage_needs_format_version_3(odd: Any) -> None:
    for manifest in (
        replace(MANIFEST, objects={"history": odd}),
        replace(OF_RANKS, ranks={0: {"history": odd}, 1: {}}),
    ):
        assert manifest.encode().startswith(b'{"format_version": 3, ')
        assert Manifest.decode(manifest.encode(), path="m") == manifest


@pytest.mark.parametrize(
    ("manifest", "version"),
    [
        (MANIFEST, "0"),
        (MANIFEST, "3"),
        (OF_RANKS, "1"),
        (OF_RANKS, "3"),
        (IN_PIECES, "1"),
        (replace(IN_PIECES, ranks={0: {}}), "2"),
    ],
)
def test_a_version_that_other_fields_have_is_corruption(manifest: Manifest, version: str) -> None:
    with pytest.raises(CorruptCheckpointError):
        Manifest.decode(encoded(body_of(manifest), version=version), path="m")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("piece_bytes", 0, "more than 0"),
        ("piece_bytes", 16.0, "whole number"),
        ("piece_bytes", 24, "less than 24 bytes"),
        ("piece_bytes", 6, "whole elements of 4 bytes"),
        ("piece_bytes", 8, "48 hexadecimal digits"),
        ("digest", DIGEST, "32 hexadecimal digits"),
        ("digest", DIGEST + DIGEST.upper(), "32 hexadecimal digits"),
    ],
)
def test_pieces_that_cannot_be_are_corruption(field: str, value: Any, said: str) -> None:
    fields = body_of(IN_PIECES)
    fields["files"][0]["tensors"][0][field] = value
    with pytest.raises(CorruptCheckpointError, match=re.escape(said)):
        Manifest.decode(encoded(fields, version="3"), path="m")


def test_pieces_of_a_dtype_that_is_not_known_here_are_read() -> None:
    tensor = replace(CUT, dtype="float4", piece_bytes=15)
    assert tensor.piece_bytes == 15
    with pytest.raises(ManifestError, match="32 hexadecimal digits"):
        replace(tensor, digest=DIGEST)


@pytest.mark.parametrize(
    "manifest",
    [
        *(MANIFEST, IN_PIECES, OF_RANKS),
        replace(MANIFEST, objects={'\u00e9 "\n\U0001f600': [1.5, -1, "\ud800", {"": []}, 2**70]}),
    ],
    ids=["plain", "in pieces", "of ranks", "odd"],
)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert Manifest.decode(manifest.encode(), path="m") == manifest


def test_every_changed_byte_is_corruption() -> None:
    data = MANIFEST.encode()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CorruptCheckpointError):
            Manifest.decode(bytes(damaged), path="m")


def test_a_newer_format_is_refused_with_advice_and_not_called_corrupt() -> None:
    data = framed('"what": "nobody knows yet"}', version="5")
    with pytest.raises(ConfigError, match=r"format version 5.*newer checkfreq"):
        Manifest.decode(data, path="m")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "JSON"),
        ('"a": ' + "[" * 100_000, "JSON"),
        ('"a": NaN}', "finite"),
        ('"a": 1, "a": 2}', "repetition"),
        ('"format_version": 1}', "repetition"),
        ('"a": ' + "9" * 5000 + "}", "JSON"),
        ('"a": 1e999}', "finite"),
        ('"files": [], "objects": ' + "[" * 500 + "]" * 500 + "}", "nesting"),
        ('"step": 1}', "a list"),
        ('"a": "\udcff"}', "JSON"),  # bytes that are not Unicode
    ],
)
def test_malformed_text_with_a_right_digest_is_corruption(body: str, said: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=said):
        Manifest.decode(framed(body), path="chk/manifest.json")


def set_at(*path: Any) -> Callable[[dict[str, Any], Any], None]:
    def change(fields: Any, value: Any) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    return change


FILE = ("files", 0)
TENSOR = ("files", 0, "tensors", 0)

NOT_COUNTS = [-1, 1.0, True, "1", None, [1], 2**63, 10**400]
NOT_DIGESTS = ["", DIGEST.upper(), DIGEST[:-1], DIGEST + "0", 5, None]
WRONG: list[tuple[tuple[Any, ...], list[Any]]] = [
    (("step",), NOT_COUNTS),
    (("attempt",), ["", "a/b", "..", "x" * 65, 5, None]),
    (("world",), [*NOT_COUNTS, 0]),
    (("created_unix_s",), [-1, "now", None, True, 10**400]),
    (("versions",), [[], None, {"torch": 2}]),
    (("objects",), [[], None, "x"]),
    (("files",), [{}, None, "x", [1], [{}], [[]]]),
    ((*FILE, "name"), ["", ".", "..", ".hidden", "a/b", "a\0b", "a\n", "\ud800", "x" * 256, 5]),
    (("files",), [2 * body_of(MANIFEST)["files"]]),
    ((*FILE, "name"), ["manifest.json", "\u00e9" * 128, None]),
    ((*FILE, "num_bytes"), [*NOT_COUNTS, 4121, 4123, 0]),
    ((*FILE, "header_bytes"), [*NOT_COUNTS, 7, 4095, 4097, 5000]),
    ((*FILE, "header_digest"), NOT_DIGESTS),
    ((*FILE, "tensors"), [{}, None, [5], [{}], []]),
    ((*TENSOR, "name"), [5, None, "weight", []]),
    ((*TENSOR, "dtype"), ["", "torch.float32", "Float", "float32", 5, None]),
    ((*TENSOR, "shape"), [None, 5, [-1], [1.0], ["1"], [2], [[1]], [10**400]]),
    ((*TENSOR, "offset"), [*NOT_COUNTS, 4096, 4119, 4121]),
    ((*TENSOR, "num_bytes"), [*NOT_COUNTS, 1, 4]),
    ((*TENSOR, "digest"), NOT_DIGESTS),
]


@pytest.mark.parametrize(("path", "value"), [(p, v) for p, values in WRONG for v in values])
def test_every_impossible_value_is_corruption(path: tuple[Any, ...], value: Any) -> None:
    fields = body_of(MANIFEST)
    set_at(*path)(fields, value)
    with pytest.raises(CorruptCheckpointError):
        Manifest.decode(encoded(fields), path="m")


@pytest.mark.parametrize("path", [(), FILE, TENSOR], ids=["record", "file", "tensor"])
def test_missing_and_unknown_fields_are_corruption(path: tuple[Any, ...]) -> None:
    def spoilt(change: Callable[[dict[str, Any]], object]) -> None:
        fields = target = body_of(MANIFEST)
        for key in path:
            target = target[key]
        change(target)
        with pytest.raises(CorruptCheckpointError):
            Manifest.decode(encoded(fields), path="m")

    spoilt(lambda target: target.popitem())
    spoilt(lambda target: target.update(unknown=1))


WRONG_RANKS: list[Any] = [
    *([], {}),
    *({"0": value} for value in ([], None)),
    *({key: {}} for key in ("3", "-1", "01", "1.0", "", "\u0661", "9" * 99)),
]


@pytest.mark.parametrize("value", WRONG_RANKS)
def test_impossible_ranks_are_corruption(value: Any) -> None:
    fields = {**body_of(OF_RANKS), "ranks": value}
    with pytest.raises(CorruptCheckpointError, match="rank"):
        Manifest.decode(encoded(fields, version="2"), path="m")


def test_an_impossible_manifest_cannot_even_be_made() -> None:
    with pytest.raises(ManifestError, match="offset of tensor 'scalar'"):
        FileEntry("f", 4122, 4096, DIGEST, (replace(WEIGHT, name="scalar", offset=4098),))
    with pytest.raises(ManifestError, match="names of objects"):
        replace(MANIFEST, objects={1: {}})
    for ranks in ([], {3: {}}, {"0": {}}, {0: []}, {0: {1: 2}}):
        with pytest.raises(ManifestError, match="rank"):
            replace(OF_RANKS, ranks=ranks)
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(MANIFEST, objects={"a": float("inf")}).encode()


def test_a_file_that_is_not_a_manifest_is_not_quoted() -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        Manifest.decode(b"root:x:0:0:somebody else's secrets", path="m")
    assert "secret" not in f"{caught.value}{caught.value!r}"


@pytest.mark.parametrize(
    "shape", [(2**62, 0), (2**40, 2**40, 0), (1,) * 2000], ids=["large", "larger", "many"]
)
def test_a_shape_that_no_tensor_can_have_is_refused(shape: tuple[int, ...]) -> None:
    num_bytes = 0 if 0 in shape else 4
    with pytest.raises(ManifestError, match="shape|dimensions"):
        TensorEntry("a", "float32", (*shape, 8), 4096, 8 * num_bytes, DIGEST)


def test_records_are_read_without_collections_and_the_collector_stays_as_it_was() -> None:
    assert gc.isenabled()
    Manifest.decode(MANIFEST.encode(), path="m")
    assert gc.isenabled()
    gc.disable()
    try:
        Manifest.decode(MANIFEST.encode(), path="m")
        assert not gc.isenabled()
    finally:
        gc.enable()


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_the_bound_of_a_record_leaves_room_for_the_digests_of_pieces(rows: int, row: int) -> None:
    for pieces in (piece_bytes_of(rows * row), piece_bytes_of_shard([rows, row], rows * row)):
        count = -(-rows * row // pieces) if pieces else 1
        assert DIGEST_DIGITS * count < most_bytes(60, rows * row) - STATE_BYTES


def test_a_file_that_is_not_listed_is_not_found() -> None:
    assert MANIFEST.file("model.safetensors") is MODEL
    with pytest.raises(KeyError):
        MANIFEST.file("optimizer.safetensors")
