"""Parameters in shared memory that another process may write, as in Hogwild training.

No fence orders the updates of others. Whether another process has mapped the same memory is known
from ``/proc``; whether it writes is not. CUDA tensors always count as shared, and are left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from checkfreq.state.capture import covers
from checkfreq.state.checkpoint import CFCheckpoint, tensors_of
from checkfreq.state.dtensors import local_of

logger = logging.getLogger(__name__)

#: Forked loader workers inherit every mapping. torch calls them so.
_LOADER_WORKER = "pt_data_worker"
_MOST_NAMED = 4


def warn_of_sharers(chk: CFCheckpoint) -> None:
    """Name the parameters that other processes have mapped, unless they were declared settled."""
    shared = dict(_shared(chk))
    if not shared:
        return
    regions = {*_regions(Path("/proc/self/maps"), shared.values())}
    pids = [pid for pid in _others() if regions & {*_regions(Path(f"/proc/{pid}/maps"))}]
    if not pids:
        return
    more = f" and {len(shared) - _MOST_NAMED} more" if len(shared) > _MOST_NAMED else ""
    owners = dict.fromkeys(name.partition(".")[0] for name in shared)
    logger.warning(
        "parameters lie in shared memory that other processes have mapped too (%s): %s%s. If those "
        "write to it, as in Hogwild training, a checkpoint is of no single moment, and a resumed "
        "run gives other results: let one process update the parameters. If they only read it, say "
        "so: CFCheckpoint(..., settled=(%s,))",
        ", ".join(f"pid {pid}" for pid in pids[:_MOST_NAMED]),
        ", ".join([*shared][:_MOST_NAMED]),
        more,
        ", ".join(f'"{owner}"' for owner in owners),
    )


def _shared(chk: CFCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Names and memory of trained parameters in shared host memory."""
    trained, seen = chk.trained_ids(), set()
    for owner, value in chk.tracked.items():
        for key, tensor in tensors_of(value):
            local = local_of(tensor)
            if id(tensor) not in trained or id(tensor) in seen or not local.is_cpu:
                continue
            seen.add(id(tensor))
            is_shared: bool = local.is_shared()  # type: ignore[no-untyped-call]
            if is_shared and not any(covers(one, owner, key) for one in chk.settled):
                yield f"{owner}.{key}", local


def _others() -> Iterator[int]:
    """Processes that may use our memory: not the parent, which waits for what it has started."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in (os.getpid(), os.getppid()):
            name = _read(Path(f"/proc/{entry}/comm"))
            if name.strip() != _LOADER_WORKER:
                yield int(entry)


def _regions(maps: Path, tensors: Iterable[Tensor] | None = None) -> Iterator[tuple[str, str]]:
    """Device and inode of each shared mapping, or of those that hold the ``tensors``."""
    places = None if tensors is None else [tensor.data_ptr() for tensor in tensors]
    for line in _read(maps).splitlines():
        where, access, _, device, inode = line.split(maxsplit=5)[:5]
        begin, end = (int(address, 16) for address in where.split("-"))
        if access[3] == "s" and (places is None or any(begin <= at < end for at in places)):
            yield device, inode


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended, or is somebody else's
        return ""
