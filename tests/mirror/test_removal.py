"""Removing checkpoints from a mirror, against a plain model of what is kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import (
    OBJECTS,
    SUPERSEDED,
    Blob,
    Marker,
    digest_of,
    manifest_key,
    marker_key,
)
from checkfreq.mirror.removal import RemoteMarkers
from checkfreq.mirror.settings import Mirror
from checkfreq.policy.retention import KeepLast
from checkfreq.policy.retention_info import CheckpointInfo
from tests.mirror.checkpoints import markers, memory_remote


def upload(remote: RemoteObjects, step: int, pieces: list[str]) -> None:
    """A checkpoint whose pieces have these contents; the marker last."""
    blobs = []
    for text in pieces:
        data = text.encode()
        blob = Blob.piece(digest_of(data), len(data))
        remote.put(blob.key, data)
        blobs.append(blob)
    record = f"manifest of {step}".encode()
    manifest = Blob(manifest_key(step, "a"), len(record), digest_of(record))
    remote.put(manifest.key, record)
    marker = Marker(step, "a", float(step), manifest, {"m.safetensors": tuple(blobs)})
    remote.put(marker_key(step), marker.encode())


def objects(remote: RemoteObjects) -> set[str]:
    return {remote.get(key)[0].decode() for key in remote.list(OBJECTS)}


@pytest.fixture
def remote() -> RemoteObjects:
    return memory_remote()


def test_markers_of_another_future_are_set_aside_with_their_objects(remote: RemoteObjects) -> None:
    for step in (1, 5, 6):
        upload(remote, step, [f"of {step}"])
    found = RemoteMarkers(remote)
    found.set_aside([5, 6, 7])
    upload(remote, 2, ["of 2"])
    found.remove([1])
    assert list(markers(remote)) == [2]
    assert len(remote.list(SUPERSEDED)) == 2
    assert objects(remote) == {"of 5", "of 6", "of 2"}


def test_only_markers_are_removed_while_a_marker_cannot_be_read(remote: RemoteObjects) -> None:
    upload(remote, 1, ["one"])
    upload(remote, 2, ["two"])
    remote.put(marker_key(9), b"{}")
    found = RemoteMarkers(remote)
    assert found.remove([1]) == [1]
    assert objects(remote) == {"one", "two"}
    assert found.newest() == 2


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("upload"), st.lists(st.sampled_from("abcdef"), min_size=1)),
            st.tuples(st.just("remove"), st.sets(st.integers(0, 12))),
            st.tuples(st.just("policy"), st.integers(1, 3)),
        ),
        max_size=12,
    )
)
def test_any_history_leaves_whole_what_is_kept_and_no_more(acts: list[tuple[str, object]]) -> None:
    remote = RemoteObjects(Mirror("memory:///m"), store=MemoryStore())
    found = RemoteMarkers(remote)
    kept: dict[int, set[str]] = {}
    for step, (what, value) in enumerate(acts):
        if what == "upload":
            assert isinstance(value, list)
            upload(remote, step, value)
            kept[step] = set(value)
            continue
        if what == "policy":
            assert isinstance(value, int)
            doomed = set(KeepLast(value).to_remove([CheckpointInfo(s) for s in sorted(kept)]))
        else:
            assert isinstance(value, set)
            doomed = value
        found.remove(doomed)
        newest = max(kept, default=None)
        kept = {s: pieces for s, pieces in kept.items() if s not in doomed or s == newest}
    assert list(found.read()) == sorted(kept) == sorted(markers(remote))
    assert objects(remote) == set().union(*kept.values())
