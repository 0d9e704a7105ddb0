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

from tests.gpu.stages.lines import say
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
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or each start would begin processes
        context = stage.processes("torch._dynamo.backends.debugging", "torch._inductor.compile_fx")
        how = _how(stage)
        program = partial(train, how=how)
        trial = claim_same_bits(stage, program, folder, kills=(13,), context=context, **how)
        skipped = trial.whole.result["skipped_graphs"]
        say("it ran as CUDA graphs", **how, skipped=skipped, ok=skipped == 0)


def _how(stage: Stage) -> dict[str, str]:
    """The arguments of ``torch.compile``."""
    if stage.is_dry:
        return {"backend": "aot_eager"}
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if header.exists() and any(map(shutil.which, ("gcc", "clang", os.environ.get("CC", "cc")))):
        return {"mode": "reduce-overhead"}
    return {"backend": "cudagraphs"}


def train(stage: Stage, directory: str, kill: int, *, how: dict[str, Any]) -> dict[str, Any]:
    """Train, or up to the kill. A graph break in the model is an error.

    ``skipped_graphs``: how many compiled functions were left out of CUDA graphs.
    """
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
        skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        return digests(**tracked) | {"skipped_graphs": skipped}


if __name__ == "__main__":
    main()
