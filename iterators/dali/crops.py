"""torchvision's random resized crop, computed by DALI from random numbers given as data.

DALI's own random crop draws from one stream per index in the batch, so the crop of a sample would
depend on the samples loaded before it. Here all ten attempts of ``RandomResizedCrop.get_params``
are made at once, as vectors, and the first that fits is used. All of it runs on the CPU in double
precision, even if the GPU decodes (DALI keeps constants of an expression in single precision).
"""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from iterators.dali.imports import fn, math, types

#: Number of random windows to try before the central one is used.
TRIES = 10

#: Uniforms per sample: area and aspect ratio of each try, then the row and column of the window.
NUM_UNIFORMS = 2 * TRIES + 2


def random_window(
    encoded: Any, uniforms: Any, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Any, Any]:
    """Start and shape of a window in encoded images, both as ``[2] int32`` nodes (row, column).

    ``scale`` bounds the area of the window as a fraction of the image's, ``ratio`` its width
    divided by its height. ``uniforms`` are at least ``[NUM_UNIFORMS] float32``. Sizes are those of
    the upright image: the decoders apply the EXIF orientation first, and so does this.
    """
    upright = fn.peek_image_shape(encoded)[:2]
    size = fn.cast(upright, dtype=types.FLOAT64)
    draws = fn.cast(uniforms, dtype=types.FLOAT64)
    tried = _tries(draws, size, scale, ratio)
    chosen, none_fits = _first_fitting(tried, fn.reshape(_whole(upright), shape=[2, 1]))
    found = fn.reductions.sum(tried * chosen, axes=1, dtype=types.INT32)
    shape = found + none_fits * _central(size, ratio)
    free = _whole(upright) - shape
    random_start = _whole(math.floor(draws[2 * TRIES : NUM_UNIFORMS] * (free + 1)))
    return random_start + none_fits * (free // 2 - random_start), shape


def _tries(draws: Any, size: Any, scale: tuple[float, float], ratio: tuple[float, float]) -> Any:
    """Height and width of every try, ``[2, TRIES] int32``."""
    low, high = log(ratio[0]) / 2, log(ratio[1]) / 2
    side = math.sqrt(_between(draws[:TRIES], *scale) * (size[0] * size[1]))
    stretch = math.exp(_between(draws[TRIES : 2 * TRIES], low, high))
    return _rounded(fn.stack(side / stretch, side * stretch))


def _first_fitting(tried: Any, limits: Any) -> tuple[Any, Any]:
    """The first try within ``limits``, as a one-hot ``[TRIES]``, and 1 if there is none, else 0."""
    fits = fn.reductions.min(_whole((tried > 0) & (tried <= limits)), axes=0)
    tries = types.Constant(np.arange(-TRIES, 0, dtype=np.int32), device="cpu")
    first = fn.reductions.min(tries * fits)
    return _whole(tries == first), _whole(first == 0)


def _central(size: Any, ratio: tuple[float, float]) -> Any:
    """Height and width of the largest window within ``ratio``, ``[2] int32``."""
    widest = _rounded(fn.stack(size[1] / ratio[0], size[0] * ratio[1]))
    return math.min(_whole(size), widest)


def _between(draws: Any, low: float, high: float) -> Any:
    return low + draws * (high - low)


def _rounded(values: Any) -> Any:
    return _whole(math.floor(values + 0.5))


def _whole(values: Any) -> Any:
    return fn.cast(values, dtype=types.INT32)
