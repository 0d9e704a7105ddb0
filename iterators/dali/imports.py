"""The only module that imports DALI, so that a missing DALI gives one and the same error."""

from __future__ import annotations

try:
    from nvidia.dali import Pipeline, __version__, fn, math, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator
except ImportError as error:
    raise ImportError(
        f'NVIDIA DALI cannot be imported ({error}): pip install "checkfreq[dali]"'
    ) from error

__all__ = [
    "DALIClassificationIterator",
    "Pipeline",
    "__version__",
    "fn",
    "math",
    "pipeline_def",
    "types",
]
