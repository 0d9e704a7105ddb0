"""Which commit records this process parses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from checkfreq.store.manifest import Manifest


@contextmanager
def steps_parsed() -> Iterator[list[int]]:
    """Their steps, in the order in which they are parsed."""
    decode, steps = Manifest.decode, list[int]()

    def counting(data: bytes, *, path: Path | str) -> Manifest:
        manifest = decode(data, path=path)
        steps.append(manifest.step)
        return manifest

    with patch.object(Manifest, "decode", counting):
        yield steps
