"""How fast a mirror uploads, beside its client alone, and what that adds to training.

    python -m benchmarks.mirror --mib 256 --rounds 5 --url s3://bucket/bench --option endpoint=...

Arms that take turns in random order, each of which uploads the checkpoint of its round, all of
whose bytes are new:

- ``mirror``: pieces, manifest, the service's list, and the marker, as the worker does it;
- ``client``: obstore's ``put`` of each file of the checkpoint, with the same size of parts and the
  same number at a time, and nothing else.

Then multiplications of two matrices are timed while the worker uploads, and after that. Without
``--url`` a folder is uploaded to, which shows the cost of the mirror rather than that of a service.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import obstore
import torch

from benchmarks.lab.estimate import quartiles
from benchmarks.lab.record import emit, median_ratio
from benchmarks.lab.rounds import Seconds, interleaved
from benchmarks.lab.states import Block, manual_manager
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast, Mirror
from checkfreq.mirror.bandwidth import Bandwidth
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.settings import open_store
from checkfreq.mirror.uploader import Uploader
from checkfreq.store.store import CheckpointStore

_MIB = 2**20
_AT_A_TIME = 4
_LONGEST_S = 600.0
#: Iterations that are timed during an upload, and as many after it.
_ITERATIONS = 40


class Checkpoints:
    """A directory with a new checkpoint whenever it is asked for one."""

    def __init__(self, manager: CFManager, block: Block, folder: Path) -> None:
        self._manager, self._block = manager, block
        self.store = CheckpointStore(folder)
        self._used: set[str] = set()
        self.step = 0

    def next_for(self, arm: str) -> int:
        """A checkpoint that ``arm`` has not uploaded yet."""
        if not self.step or arm in self._used:
            with self._manager.updating():
                self._block.change()
            self._manager.step()
            self._manager.save(wait=True)
            self.step, self._used = self._manager.global_step, set()
        self._used.add(arm)
        return self.step


def upload_arms(mirror: Mirror, checkpoints: Checkpoints, *, rounds: int) -> Seconds:
    """Seconds of each arm in each round."""
    remote = RemoteObjects(mirror)
    store = open_store(mirror)
    uploader = Uploader(
        remote,
        checkpoints.store,
        bandwidth=Bandwidth(None),
        part_bytes=mirror.part_bytes,
        go_on=lambda sending: None,
    )

    def ours() -> dict[str, float]:
        step = checkpoints.next_for("mirror")
        start_s = time.perf_counter()
        uploader.upload(step)
        return {"mirror": time.perf_counter() - start_s}

    def client() -> dict[str, float]:
        step = checkpoints.next_for("client")
        start_s = time.perf_counter()
        for path in sorted(checkpoints.store.path(step).iterdir()):
            obstore.put(
                store,
                f"alone/{step}/{path.name}",
                path,
                chunk_size=mirror.part_bytes,
                max_concurrency=_AT_A_TIME,
            )
        return {"client": time.perf_counter() - start_s}

    ours(), client()  # connections, and the probe of what the service can do
    seconds = interleaved([ours, client], rounds=rounds)
    uploader.close()
    return seconds


def training_arms(mirror: Mirror, folder: Path, num_bytes: int, *, rounds: int) -> Seconds:
    """Seconds per iteration while the worker uploads, and after it."""
    seconds: Seconds = {"during": [], "after": []}
    block = Block(num_bytes)
    weights = torch.rand(1024, 1024)

    def iterations(manager: CFManager, *, while_uploading: bool) -> float:
        taken = []
        for _ in range(_ITERATIONS):
            start_s = time.perf_counter()
            torch.mm(weights, weights)
            taken.append(time.perf_counter() - start_s)
            if while_uploading and not is_uploading(manager):
                break
        return sum(taken) / len(taken)

    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    with CFManager(
        folder,
        CFCheckpoint(model=block, optimizer=optimizer),
        mode=CFMode.MANUAL,
        chk_freq=0,
        retention=KeepLast(1),
        config=CFConfig(mirror=mirror),
    ) as manager:
        for _ in range(rounds):
            with manager.updating():
                block.change()
            manager.step()
            manager.save(wait=True)
            step = manager.global_step
            # The upload of a small checkpoint may be over before anybody looks.
            wait_until(
                manager, lambda step=step: is_uploading(manager) or uploaded_step(manager) == step
            )
            seconds["during"].append(iterations(manager, while_uploading=True))
            wait_until(manager, lambda step=step: uploaded_step(manager) == step)
            seconds["after"].append(iterations(manager, while_uploading=False))
    return seconds


def is_uploading(manager: CFManager) -> bool:
    """Whether the worker uploads now."""
    manager._persistence.reap()
    return str(manager.stats()["mirror"]["state"]) == "uploading"


def uploaded_step(manager: CFManager) -> int | None:
    """The newest step in the mirror."""
    found: int | None = manager.stats()["mirror"]["uploaded_step"]
    return found


def wait_until(manager: CFManager, holds: object) -> None:
    """Wait for the worker's reports until it holds."""
    assert callable(holds)
    done = manager._persistence.wait_until(holds, timeout_s=_LONGEST_S, look_every_s=0.005)
    assert done, manager.stats()["mirror"]


def main() -> None:
    """Print one line per part."""
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="mirror-") as scratch:
        url = args.url or Path(scratch, "remote").absolute().as_uri()
        mirror = Mirror(url, options=dict(args.option) if args.url else None)
        num_bytes = int(args.mib * _MIB)
        block = Block(num_bytes)
        chk_dir = Path(scratch, "chk")
        with manual_manager(str(chk_dir), block) as manager:
            seconds = upload_arms(mirror, Checkpoints(manager, block, chk_dir), rounds=args.rounds)
        _report_uploads(args, seconds)
        beside = Mirror(f"{url}/training", options=mirror.options)
        slowed = training_arms(beside, Path(scratch, "run"), num_bytes, rounds=args.rounds)
        _report_training(args, slowed)


def _report_uploads(args: argparse.Namespace, seconds: Seconds) -> None:
    low, high = quartiles([a / b for a, b in zip(*_both(seconds), strict=True)])
    emit(
        "mirror",
        folder=Path(args.folder),
        packages=["obstore"],
        arm="upload",
        service=args.service,
        mib=args.mib,
        rounds=args.rounds,
        mirror_mib_per_s=round(args.mib / median(seconds["mirror"]), 1),
        client_mib_per_s=round(args.mib / median(seconds["client"]), 1),
        ratio=round(median_ratio(*_both(seconds)), 3),
        low={"ratio": round(low, 3)},
        high={"ratio": round(high, 3)},
    )


def _both(seconds: Seconds) -> tuple[list[float], list[float]]:
    """As a ratio of rates: ours over the client's."""
    return seconds["client"], seconds["mirror"]


def _report_training(args: argparse.Namespace, seconds: Seconds) -> None:
    added = [a / b - 1 for a, b in zip(seconds["during"], seconds["after"], strict=True)]
    low, high = quartiles(added)
    emit(
        "mirror",
        folder=Path(args.folder),
        packages=["obstore"],
        arm="training",
        service=args.service,
        mib=args.mib,
        rounds=args.rounds,
        iteration_ms=round(median(seconds["after"]) * 1e3, 2),
        added=round(median(added), 4),
        low={"added": round(low, 4)},
        high={"added": round(high, 4)},
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=float, default=256.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="uploads of each arm")
    parser.add_argument("--url", help="where to upload to; default: a folder")
    parser.add_argument("--service", default="folder", help="what that is, for the table")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=lambda text: tuple(text.split("=", 1)),
        help="NAME=VALUE, a setting of the client",
    )
    parser.add_argument("--folder", default=".", help="a folder on the disk of the checkpoints")
    return parser.parse_args()
