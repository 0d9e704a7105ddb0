"""The small objects of a mirror: what is written is read back, and nothing else is taken."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from checkfreq.errors import CorruptCheckpointError
from checkfreq.mirror.layout import (
    Blob,
    Claim,
    Finish,
    Marker,
    decode_marks,
    encode_marks,
    manifest_key,
    marker_key,
    superseded_key,
)
from checkfreq.store.marks import StepMark

PIECE = Blob.piece("0123456789abcdef" * 2, 77)
MARKER = Marker(
    7, "a-1", 1.5, Blob(manifest_key(7, "a-1"), 9, "f" * 32), {"m.safetensors": (PIECE, PIECE)}
)
CLAIM = Claim("run", "session", "host", 12, 1.0, 2.0)


def test_what_is_written_is_read_back() -> None:
    assert Marker.decode(MARKER.encode(), key=marker_key(7)) == MARKER
    assert Marker.decode(MARKER.encode(), key=superseded_key(7, "a-1")) == MARKER
    assert Finish.decode(Finish(3, False).encode()) == Finish(3, False)
    assert Claim.decode(CLAIM.encode()) == CLAIM
    with pytest.raises(CorruptCheckpointError):
        Claim.decode(CLAIM.encode().replace(b'"host": "host"', b'"host": 5'))
    marks = {
        1: StepMark(keep=True, at_epoch_end=True),
        2: StepMark(metrics={"loss": float("inf"), "acc": 0.5}, finished=True),
    }
    assert decode_marks(encode_marks(marks)) == marks
    assert MARKER.num_bytes == 2 * 77
    assert MARKER.keys() == {PIECE.key, manifest_key(7, "a-1")}


Change = Callable[[dict[str, object]], object]


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda m: m.update(format="other"), "format"),
        (lambda m: m.update(more=1), "names of fields"),
        (lambda m: m.update(step=8), "step"),
        (lambda m: m.update(attempt="../x"), "attempt"),
        (lambda m: m.update(at_epoch_end=1), "at_epoch_end"),
        (lambda m: m["manifest"].update(key="objects/x"), "manifest"),
        (lambda m: m["manifest"].update(bytes=-1), "bytes"),
        (lambda m: m.update(files=[]), "files"),
        (lambda m: m.update(files={"../m": [PIECE.to_json()]}), "file name"),
        (lambda m: m["files"]["m.safetensors"][0].update(key="claim.json"), "key"),
    ],
)
def test_a_marker_with_an_impossible_value_is_refused_by_name(change: Change, check: str) -> None:
    fields = json.loads(MARKER.encode())
    change(fields)
    with pytest.raises(CorruptCheckpointError, match=check):
        Marker.decode(json.dumps(fields).encode(), key=marker_key(7), url="s3://bucket/x")
