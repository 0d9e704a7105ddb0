"""Cutting payload files into runs of whole tensors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkfreq.mirror.layout import Blob
from checkfreq.mirror.pieces import APART_BYTES, LEAST_BYTES, Run, cut, runs_of, units_of
from checkfreq.store.manifest import FileEntry, TensorEntry

HEADER = 4096


def file_of(*tensors: tuple[int, int]) -> FileEntry:
    """A file whose tensors have these sizes and contents (a number stands for the digest)."""
    at, entries = HEADER, []
    for index, (num_bytes, content) in enumerate(tensors):
        entries.append(
            TensorEntry(f"t{index}", "uint8", (num_bytes,), at, num_bytes, f"{content:016x}")
        )
        at += num_bytes
    return FileEntry("model.safetensors", at, HEADER, "0" * 16, tuple(entries))


def uploaded(runs: list[Run]) -> list[Run]:
    """The runs with an object each."""
    return [Run(run.units, Blob.piece(f"{i:032x}", run.num_bytes)) for i, run in enumerate(runs)]


def sizes(runs: list[Run]) -> list[int]:
    return [run.num_bytes for run in runs]


def test_a_large_tensor_is_a_piece_by_itself_between_small_ones() -> None:
    runs = cut(file_of((100, 1), (LEAST_BYTES, 2), (200, 3), (300, 4)))
    assert sizes(runs) == [HEADER + 100, LEAST_BYTES, 500]


def test_small_unchanged_tensors_are_taken_out_of_a_piece_that_changes() -> None:
    frozen = [(APART_BYTES, 1), (APART_BYTES, 2)]
    before = uploaded(cut(file_of(*frozen, (APART_BYTES, 3))))
    assert len(before) == 1

    second = uploaded(cut(file_of(*frozen, (APART_BYTES, 4)), before=before))
    third = cut(file_of(*frozen, (APART_BYTES, 5)), before=second)

    assert sizes(second) == [HEADER + 2 * APART_BYTES, APART_BYTES]
    assert [run.blob for run in third] == [second[0].blob, None]


tensors = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 5000, APART_BYTES, LEAST_BYTES - 1, LEAST_BYTES, 3 * LEAST_BYTES]),
        st.integers(0, 3),
    ),
    max_size=12,
)


@given(tensors, tensors)
def test_pieces_cover_the_file_once_in_order_whatever_changed(
    old: list[tuple[int, int]], new: list[tuple[int, int]]
) -> None:
    file = file_of(*new)
    before = uploaded(cut(file_of(*old)))
    runs = cut(file, before=before)
    assert tuple(unit for run in runs for unit in run.units) == units_of(file)
    kept = {run.blob: run.units for run in before}
    for run in runs:
        assert run.blob is None or kept[run.blob] == run.units


@given(tensors)
def test_the_pieces_of_a_marker_are_found_again_in_the_manifest(old: list[tuple[int, int]]) -> None:
    file = file_of(*old)
    runs = uploaded(cut(file))
    assert runs_of(file, [run.blob for run in runs if run.blob]) == runs
