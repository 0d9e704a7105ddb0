"""The only module that imports DALI, so that a missing DALI gives one and the same error.

It also keeps forks of this process, such as loader workers, from ending its pipelines. A fork has
none of their threads, and a pipeline that it ends waits for them for ever. Pipelines lie in cycles,
so the garbage collector of any fork may find one that the parent dropped; what exists at the fork
is therefore left to the parent.
"""

from __future__ import annotations

import gc
import os

try:
    from nvidia.dali import Pipeline, __version__, fn, math, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator
except ImportError as error:
    raise ImportError(
        f'NVIDIA DALI cannot be imported ({error}): pip install "checkfreq[dali]"'
    ) from error

os.register_at_fork(after_in_child=gc.freeze)

__all__ = [
    "DALIClassificationIterator",
    "Pipeline",
    "__version__",
    "fn",
    "math",
    "pipeline_def",
    "types",
]
