"""Ways to checkpoint a training, ours and other libraries', for the benchmarks to compare.

`PEERS` has all of them by name; `installed` those whose packages are installed. A library that does
not sync what it writes appears twice: as it is, and with its files and folders synced after its own
write, in the background if it writes there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.lab.capacity import SLOTS
from benchmarks.lab.saver import Peer, Saved, Saver, Training
from benchmarks.peers.dcp import KINDS, Dcp
from benchmarks.peers.folders import InFolders, Library
from benchmarks.peers.ours import CheckFreq
from benchmarks.peers.torch_files import Safetensors, TorchSave
from benchmarks.peers.torch_snapshot import TorchSnapshot
from benchmarks.peers.trainers import Accelerate, Lightning, Trainer

__all__ = ["OURS", "PEERS", "Peer", "Saved", "Saver", "Training", "installed"]

OURS = "checkfreq"


def _both(
    name: str, library: Callable[[Training], Library], packages: tuple[str, ...], like: str = ""
) -> tuple[Peer, Peer]:
    """The two variants of a library: as it is, and synced; both restore like ``like`` if given."""

    def make(folder: Path, training: Training, *, sync: bool) -> Saver:
        return InFolders(folder, library(training), sync=sync)

    synced = f"{name}, synced"
    return (
        Peer(name, partial(make, sync=False), packages, False, restores_as=like or synced),
        Peer(synced, partial(make, sync=True), packages, True, restores_as=like),
    )


def _dcp(name: str) -> Peer:
    """A library that syncs its files itself."""

    def make(folder: Path, training: Training) -> Saver:
        return InFolders(folder, Dcp(training, name=name), sync=False)

    return Peer(
        name,
        make,
        (),
        synced=True,
        restores_as="" if name == _DCP else _DCP,
        note="stages in a thread: buffers that a forward pass changes are torn"
        if KINDS[name][1]
        else "",
        keeps=0.0 if KINDS[name][0] is None else 1.0,
    )


_DCP, _READS, _SNAPSHOT = "dcp.save", "torchsnapshot, synced", ("torchsnapshot",)


_ALL: tuple[Peer, ...] = (
    Peer(OURS, CheckFreq, (), synced=True, keeps=SLOTS),
    *_both("torch.save", TorchSave, ()),
    *_both("safetensors", Safetensors, ("safetensors",)),
    *(_dcp(name) for name in KINDS),
    *_both("torchsnapshot", partial(TorchSnapshot, aside=False), _SNAPSHOT),
    *_both("torchsnapshot, async", partial(TorchSnapshot, aside=True), _SNAPSHOT, like=_READS),
    *_both("lightning, async", Lightning, ("lightning",)),
    *_both("transformers Trainer", Trainer, ("transformers", "accelerate")),
    *_both("accelerate", Accelerate, ("accelerate", "safetensors")),
)

PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}


def installed(
    names: Iterable[str] | None = None, *, among: Mapping[str, Peer] = PEERS
) -> dict[str, Peer]:
    """The installed ones of ``names`` (or all) and ours, in the order of ``among``.

    For the others a sentence goes to standard error.
    """
    wanted = set(among if names is None else names) | {OURS}
    peers = {name: peer for name, peer in among.items() if name in wanted}
    needed = {package for peer in peers.values() for package in peer.packages}
    missing = {package for package in needed if find_spec(package) is None}
    for package in sorted(missing):
        without = [repr(name) for name, peer in peers.items() if package in peer.packages]
        print(f"{package} is not installed: without {', '.join(without)}", file=sys.stderr)
    return {name: peer for name, peer in peers.items() if missing.isdisjoint(peer.packages)}
