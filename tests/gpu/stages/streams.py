"""States that are easily torn or lost: other streams, generators, tiny tensors, growing slots.

``update``: every weight is the number of the step, and so is a count on the host; each checkpoint
must have one number in all of them, wherever the update ran. ``generator``: numbers drawn on the
device by a run that was interrupted, its tracked state on the host alone. ``tiny``: how long
``save()`` holds training (ms), by the number of tensors. ``growing``: seconds of each ``step()`` of
a state that outgrows its slots.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from iterators import CFIterator
from tests.gpu.stages.lines import is_dry, say, scratch, synchronize

DRY = is_dry()
DEVICE = torch.device("cpu" if DRY else "cuda")
_LATE = 40_000_000  # cycles of work in front of an update
_SHOWN = 6

JOINED = "on the current stream"
SIDE = "on a side stream, joined after step()"
NEVER = "on a side stream, never joined"


def main() -> None:
    """Run each; one that raises has a line that says so."""
    logging.basicConfig(level=logging.ERROR)
    cases: dict[str, Callable[[Path], dict[str, Any]]] = {
        "update, " + JOINED: partial(updates, JOINED),
        "update, " + SIDE: partial(updates, SIDE),
        "update, " + NEVER: partial(updates, NEVER),
        "generator": generator,
        "default device": default_device,
        "tiny, few": partial(tiny, 20 if DRY else 2_000),
        "tiny, many": partial(tiny, 100 if DRY else 5_000),
        "growing": growing,
    }
    for name, case in cases.items():
        began_s = time.perf_counter()
        with scratch() as folder:
            try:
                found = case(Path(folder))
            except Exception as error:
                found = {"ok": False, "why": f"{type(error).__name__}: {error}"[:400]}
        say(name, **found, seconds=round(time.perf_counter() - began_s, 2))


def manager_of(folder: Path, *, every: int = 1, **tracked: Any) -> CFManager:
    """A manager that keeps what it takes, in slots that are just large enough."""
    return CFManager(
        folder,
        CFCheckpoint(**tracked),
        mode=CFMode.MANUAL,
        chk_freq=every,
        retention=KeepLast(1000),
        config=CFConfig(keep_in_memory_s=0, arena_slack=0.0),
    )


def updates(where: str, folder: Path) -> dict[str, Any]:
    """Train on one stream or on two; the host never waits for the second."""
    weight = nn.Parameter(torch.zeros((1 if DRY else 16) << 20, device=DEVICE))
    weight.grad = torch.full_like(weight, -1.0)
    model, count = nn.ParameterList([weight]), {"n": 0}
    optimizer = torch.optim.SGD([weight], lr=1.0)
    side = None if DRY or where == JOINED else torch.cuda.Stream()
    with manager_of(folder, model=model, optimizer=optimizer, count=count) as manager:
        manager.step()
        manager.save(wait=True)  # the slots are ready from here on
        for number in range(1, 4 if DRY else 13):
            with _on(side):
                optimizer.step()
            count["n"] = number
            manager.step()
            if side is not None and where == SIDE:
                torch.cuda.current_stream().wait_stream(side)
            manager.wait()
        synchronize(DEVICE)
    torn = [pair for step in _steps(folder) if (pair := _pair(folder, step)) is not None]
    stats = manager.stats()
    return {
        "durable": stats["num_committed"],
        "failed": stats["num_failed"],
        "torn": torn[:_SHOWN],
        "ok": not torn and stats["num_committed"] > 1,
    }


@contextlib.contextmanager
def _on(side: torch.cuda.Stream | None) -> Iterator[None]:
    """What is queued inside runs late, on a stream that waits for the current one."""
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(_LATE)
        yield


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def _pair(folder: Path, step: int) -> list[Any] | None:
    """The count and the weights of a checkpoint; None if they are one number."""
    state = checkfreq.load(folder, step=step)
    count, (weight,) = state["count"]["n"], state["model"].values()
    if bool((weight == count).all()):
        return None
    return [count, *weight.unique()[:_SHOWN].tolist()]


def generator(folder: Path) -> dict[str, Any]:
    """Interrupted equals uninterrupted, as in training with all state offloaded to the host."""

    def life(name: str, num_steps: int) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        drawn = []
        with manager_of(folder / name, model=model, optimizer=optimizer) as manager:
            manager.restore()
            for _ in range(num_steps):
                drawn.append(torch.rand(3, device=DEVICE).cpu())
                model(torch.ones(2, 8)).sum().backward()
                manager.weight_update()
                manager.step()
        return drawn

    whole = torch.stack(life("whole", 6))
    parts = torch.stack([*life("parts", 3), *life("parts", 3)])
    return {"ok": torch.equal(whole, parts)}


def default_device(folder: Path) -> dict[str, Any]:
    """An epoch where new tensors are on the device unless told otherwise."""
    images = torch.arange(32.0).reshape(32, 1)
    model = nn.Linear(1, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.set_default_device(DEVICE)
    try:
        seen: list[float] = []
        with manager_of(folder, model=model, optimizer=optimizer) as manager:
            loader = DataLoader(TensorDataset(images), batch_size=8)
            batches = CFIterator(loader, cf_manager=manager)
            manager.restore()
            for (batch,) in batches:
                seen += batch.flatten().tolist()
                model(batch.to(DEVICE)).sum().backward()
                manager.weight_update()
    finally:
        torch.set_default_device(None)
    return {"ok": sorted(seen) == images.flatten().tolist()}


def tiny(num_tensors: int, folder: Path) -> dict[str, Any]:
    """AdamW's state of many small parameters."""
    parts = [nn.Parameter(torch.randn(1024, device=DEVICE)) for _ in range(num_tensors)]
    model = nn.ParameterList(parts)
    optimizer = torch.optim.AdamW(parts, lr=1e-3, fused=not DRY)
    for part in parts:
        part.grad = torch.ones_like(part)
    held_ms = []
    with manager_of(folder, every=0, model=model, optimizer=optimizer) as manager:
        for _ in range(4):
            manager.weight_update()
            manager.step()
            synchronize(DEVICE)
            began_s = time.perf_counter()
            manager.save()
            held_ms.append(round((time.perf_counter() - began_s) * 1e3, 2))
            manager.wait()
        saved = checkfreq.load(folder)["model"].values()
        is_same = all(torch.equal(one.cpu(), two) for one, two in zip(parts, saved, strict=True))
    return {"tensors": 3 * num_tensors, "held_ms": held_ms, "ok": is_same}


def growing(folder: Path) -> dict[str, Any]:
    """The slots are replaced at three of the boundaries."""
    unit = (1 if DRY else 32) << 20
    held = {"first": torch.zeros(2 * unit, device=DEVICE)}
    seconds = []
    with manager_of(folder, held=held) as manager:
        for number in range(1, 5):
            with manager.updating():
                held["second"] = torch.full((number * unit,), float(number), device=DEVICE)
            began_s = time.perf_counter()
            manager.step()
            seconds.append(round(time.perf_counter() - began_s, 3))
            manager.save(wait=True)  # or the next one would find no slots to replace
        saved = checkfreq.load(folder)["held"]["second"]
    return {"step_s": seconds, "ok": torch.equal(saved, held["second"].cpu())}


if __name__ == "__main__":
    main()
