"""torchvision's random resized crop, computed by DALI from random numbers that come in as data.

DALI's own random crop draws from a stream per place in the batch, so a sample's crop would
depend on what was loaded before it. Here all ten tries of ``RandomResizedCrop.get_params`` are
made at once, as vectors; the first that fits is taken. Everything is on the CPU and in double
precision (but DALI keeps a constant of an expression in single), also if the GPU decodes.
"""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from iterators.dali.imports import fn, math, types

#: How often a window is tried before the central one is taken.
TRIES = 10

#: Uniforms per sample: area and aspect of each try, then the window's row and column.
NUM_UNIFORMS = 2 * TRIES + 2


def random_window(
    encoded: Any, uniforms: Any, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Any, Any]:
    """Start and shape of a window, both ``[2] int32`` nodes (row, column), of encoded images.

    ``scale`` is the window's share of the image's area, ``ratio`` its width over its height;
    ``uniforms`` are ``[NUM_UNIFORMS] float32`` or more. Sizes are those of the upright image:
    EXIF orientation is applied first, as the decoders do.
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
    """The first try within ``limits`` as ``[TRIES]`` of one 1 and zeros; 1 if there is none."""
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
