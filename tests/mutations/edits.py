"""What a deliberate break is: exact texts, and what replaces them.

Breaks are written as changes are shown, of parts of lines as well:

    @ snapshot/device_copier.py | fake
    = test_that_catches_them_on_a_gpu
    # the name of a break
    - what is found once in that file
    -     may have several lines
    + what replaces it

A second ``-`` after a ``+`` begins another edit of the same break. The word after the file says
where breaks are noticed without a GPU, as in ``WHERE``. ``none: why`` instead of a test: nothing
shows them on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import itemgetter

#: Files of tests that notice breaks without a GPU; nowhere: the fake device has its own of this.
WHERE = {
    "fake": (
        "tests/snapshot/test_device_engine.py",
        "tests/snapshot/test_device_order.py",
        "tests/snapshot/test_device_capture.py",
        "tests/snapshot/test_device_and_host.py",
    ),
    "pinned": ("tests/snapshot/test_pinning.py",),
    "cpu": ("tests/snapshot/test_engine.py", "tests/snapshot/test_snapshotter.py"),
    "generators": ("tests/state/test_device_generators.py",),
    "restores": ("tests/restore/test_device_target.py", "tests/restore/test_device_stream.py"),
    "nowhere": None,
}


@dataclass(frozen=True, slots=True)
class Break:
    """``edits`` are (text, its replacement) pairs, all in ``file``.

    ``gpu`` is the test that catches it on a real device, ``fake`` where to look without one.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    gpu: str | None
    fake: tuple[str, ...] | None
    why: str = ""


def breaks_in(text: str) -> tuple[Break, ...]:
    """All breaks of a text as above."""
    return tuple(_read(text.strip("\n").split("\n")))


def _read(lines: list[str]) -> Iterator[Break]:
    file = where = test = ""
    blocks = [(sign, [line[2:] for line in some]) for sign, some in groupby(lines, itemgetter(0))]
    for at, (sign, (first, *_)) in enumerate(blocks):
        if sign == "@":
            file, where = first.split(" | ")
        elif sign == "=":
            test = first
        elif sign == "#":
            rest = ["\n".join(part) for _, part in takewhile(_is_edit, blocks[at + 1 :])]
            edits = tuple(zip(rest[::2], rest[1::2], strict=True))
            gpu, _, why = test.partition("none: ")
            yield Break(first, f"checkfreq/{file}", edits, gpu or None, WHERE[where], why)


def _is_edit(block: tuple[str, list[str]]) -> bool:
    return block[0] in "+-"
