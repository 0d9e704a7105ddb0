"""The server from which tests fork their trainers: torch is imported once, not in each of them.

There is one per test session, and what it has imported is fixed when it starts; so all that any
trainer needs is listed here. It starts with the first child.
"""

from __future__ import annotations

import multiprocessing

FORK_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "pytest",
    "torch._dynamo",  # torch.optim imports it at its first step, which takes seconds
    "torch._dynamo.backends.debugging",
    "torch._functorch.aot_autograd",
    "checkfreq.examples.imagenet.models",
    "tests.acceptance.programs",
    "tests.acceptance.trainer",
    "tests.integrations.ranks",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tests.ranks.tiny",
    "tests.acceptance.rank_training",
    "tests.silence.training",
    "tests.state.sharded",
]
FORK_SERVER.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Have the server import these too: large frameworks, where they are going to be tested."""
    _PRELOADED.extend(module for module in modules if module not in _PRELOADED)
    FORK_SERVER.set_forkserver_preload(_PRELOADED)
