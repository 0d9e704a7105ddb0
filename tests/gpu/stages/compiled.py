"""A model under ``torch.compile(mode="reduce-overhead")``: a SIGKILL, same bits.

    python -m tests.gpu.stages.compiled [--dry]

The starts share the kernels that the first one compiles. Where there is no compiler for what
launches them, the model's own kernels go into CUDA graphs (the backend ``cudagraphs``); a dry run
compiles nothing (``aot_eager``).
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.gpu.stages.resuming import (
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

_STEPS = 24


def main() -> None:
    """Print a claim for each part of the state, and one that nobody warned of anything."""
    stage = Stage.begin()
    with part("compiled") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "kernels")
        context = stage.processes("torch._dynamo.backends.debugging")
        how = _how(stage)
        program = partial(train, how=how)
        claim_same_bits(stage, program, folder, kills=(13,), context=context, **how)


def _how(stage: Stage) -> dict[str, str]:
    """The arguments of ``torch.compile``."""
    if stage.is_dry:
        return {"backend": "aot_eager"}
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if header.exists() and any(map(shutil.which, ("gcc", "clang", os.environ.get("CC", "cc")))):
        return {"mode": "reduce-overhead"}
    return {"backend": "cudagraphs"}


def train(stage: Stage, directory: str, kill: int, *, how: dict[str, Any]) -> dict[str, str]:
    """Train, or up to the kill. A graph break in the model is an error."""
    begin()
    width = 64 if stage.is_dry else 1024
    bare = nn.Sequential(
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(width, 8),
    ).to(stage.device)
    model = torch.compile(bare, fullgraph=True, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = Losses(_STEPS, stage.device)
    tracked = {"model": model, "optimizer": optimizer, "losses": losses}
    with opened(directory, 2, **tracked) as manager:
        restore(stage, manager, bare)
        while manager.global_step < _STEPS:
            tick(manager, kill)
            torch.compiler.cudagraph_mark_step_begin()
            loss = model(torch.randn(32, width, device=stage.device)).square().mean()
            loss.backward()
            losses.note(manager, loss)
            manager.weight_update()
            optimizer.zero_grad()
            manager.step()
        return digests(**tracked)


if __name__ == "__main__":
    main()
