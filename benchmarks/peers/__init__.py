"""Ways to checkpoint a training, ours and others', as benchmarks compare them.

`PEERS` has all of them by name; `installed` those whose packages are there. Where a peer does not
sync what it writes, there are two of it: as it is, and with its files and folders synced behind its
own write, in the background where that is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.peers.folders import InFolders, Library
from benchmarks.peers.ours import CheckFreq
from benchmarks.peers.saver import Peer, Saved, Saver, Training
from benchmarks.peers.torch_files import Safetensors, TorchSave

__all__ = ["PEERS", "Peer", "Saved", "Saver", "Training", "installed"]

OURS = "checkfreq"


def _both(
    name: str, library: Callable[[Training], Library], packages: tuple[str, ...], note: str = ""
) -> tuple[Peer, Peer]:
    """As it is, and synced."""

    def make(folder: Path, training: Training, *, sync: bool) -> Saver:
        return InFolders(folder, library(training), sync=sync)

    synced = f"{name}, synced"
    return (
        Peer(name, partial(make, sync=False), packages, False, note, restores_as=synced),
        Peer(synced, partial(make, sync=True), packages, True, note),
    )


_ALL: tuple[Peer, ...] = (
    Peer(OURS, CheckFreq, (), synced=True),
    *_both("torch.save", TorchSave, ()),
    *_both("safetensors", Safetensors, ("safetensors",)),
)

PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}


def installed() -> dict[str, Peer]:
    """Those whose packages are there; of the others a sentence goes to standard error."""
    missing = {package for peer in _ALL for package in peer.packages if find_spec(package) is None}
    for package in sorted(missing):
        names = ", ".join(repr(peer.name) for peer in _ALL if package in peer.packages)
        print(f"{package} is not installed: without {names}", file=sys.stderr)
    return {name: peer for name, peer in PEERS.items() if missing.isdisjoint(peer.packages)}
