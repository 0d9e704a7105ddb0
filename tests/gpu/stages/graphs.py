"""A whole iteration in a CUDA graph, replayed on a side stream inside ``updating()``, and killed.

    python -m tests.gpu.stages.graphs [--dry]

Nobody joins the side stream, and replays are queued far ahead of the device: each checkpoint must
still be its boundary. A dry run calls the iteration that the graph would hold.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import checkfreq
from tests.gpu.stages.lines import say, synchronize
from tests.gpu.stages.resuming import (
    UNDISTURBED,
    Losses,
    Stage,
    begin,
    claim_same_bits,
    digests,
    opened,
    part,
    restore,
    tick,
)
from tests.gpu.test_training import captured, digest_of

_STEPS = 60
#: Cycles of work in front of every second replay: some 10 ms, in which the host goes on. The others
#: come at once, while a snapshot may still be copied.
_BEHIND = 20_000_000


def main() -> None:
    """Print a claim for each part of the state, and one for all checkpoints."""
    stage = Stage.begin()
    with part("graphs") as folder:
        trial = claim_same_bits(stage, train, folder, kills=(23, 41), context=stage.processes())
        claim_checkpoints(folder / "killed", trial.whole.result["boundaries"])


def claim_checkpoints(chk_dir: Path, boundaries: list[str]) -> None:
    """None is torn: each has the digest of its boundary; the first of these is that of step 1."""
    steps = sorted(int(path.name[5:]) for path in chk_dir.glob("step-*"))
    torn = [
        step
        for step in steps
        if digest_of(checkfreq.load(chk_dir, step=step)) != boundaries[step - 1]
    ]
    say("checkpoints", steps=steps, torn=torn, ok=len(steps) > 2 and not torn)


def train(stage: Stage, directory: str, kill: int) -> dict[str, Any]:
    """Sixty updates, or up to the kill; the undisturbed start adds the digest of each boundary."""
    begin()
    model, batch = _made(stage)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=not stage.is_dry)
    losses, latest = Losses(_STEPS, stage.device), torch.zeros((), device=stage.device)
    tracked = {"model": model, "optimizer": optimizer, "losses": losses}

    def iterate() -> None:
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        latest.copy_(loss.detach())

    side = None if stage.is_dry else torch.cuda.Stream()
    replay = iterate if side is None else captured(iterate).replay
    boundaries = []
    with opened(directory, 1, keep=_STEPS, **tracked) as manager:
        restore(stage, manager, model)
        synchronize(stage.device)
        while manager.global_step < _STEPS:
            tick(manager, kill)
            with _on(side), manager.updating():
                if side is not None and manager.global_step % 2:
                    torch.cuda._sleep(_BEHIND)
                batch.copy_(torch.randn_like(batch))
                replay()
                losses.note(manager, latest)
            manager.step()
            if Path(directory).name == UNDISTURBED:
                synchronize(stage.device)
                boundaries.append(digest_of({n: one.state_dict() for n, one in tracked.items()}))
        synchronize(stage.device)
        found: dict[str, Any] = digests(**tracked)
    return found | {"boundaries": boundaries} if boundaries else found


def _made(stage: Stage) -> tuple[nn.Module, torch.Tensor]:
    """A model of 25 MB with its moments, with volatile buffers and dropout; its input."""
    width = 64 if stage.is_dry else 1024
    model = nn.Sequential(
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
    )
    return model.to(stage.device), torch.zeros(64, width, device=stage.device)


def _on(side: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if side is None else torch.cuda.stream(side)


if __name__ == "__main__":
    main()
