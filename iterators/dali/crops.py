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

from iterators.dali.library import fn, math, types

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
    draws = fn.cast(uniforms, dtype=types.FLOAT64)
    size = fn.cast(fn.peek_image_shape(encoded)[:2], dtype=types.FLOAT64)
    height, width = size[0], size[1]
    area = height * width * _between(draws[:TRIES], *scale)
    aspect = math.exp(_between(draws[TRIES : 2 * TRIES], log(ratio[0]), log(ratio[1])))
    widths, heights = _rounded(math.sqrt(area * aspect)), _rounded(math.sqrt(area / aspect))
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    central_width = math.min(width, _rounded(height * ratio[1]))
    central_height = math.min(height, _rounded(width / ratio[0]))
    chosen, none_fits = _first(fits)
    window_width = _picked(widths, chosen) + none_fits * _whole(central_width)
    window_height = _picked(heights, chosen) + none_fits * _whole(central_height)
    room = [_whole(height) - window_height, _whole(width) - window_width]
    start = [
        (1 - none_fits) * _whole(math.floor(draws[2 * TRIES + axis] * (free + 1)))
        + none_fits * (free // 2)
        for axis, free in enumerate(room)
    ]
    return fn.stack(*start), fn.stack(window_height, window_width)


def _between(draws: Any, low: float, high: float) -> Any:
    return low + draws * (high - low)


def _rounded(values: Any) -> Any:
    return math.floor(values + 0.5)


def _whole(values: Any) -> Any:
    return fn.cast(values, dtype=types.INT32)


def _first(fits: Any) -> tuple[Any, Any]:
    """The first try that fits as ``[TRIES]`` of one 1 and zeros, and 1 if there is none."""
    tries = types.Constant(np.arange(TRIES, dtype=np.int32), device="cpu")
    first = fn.reductions.min(tries + TRIES * (1 - _whole(fits)))
    return _whole(tries == first), _whole(first >= TRIES)


def _picked(values: Any, chosen: Any) -> Any:
    return fn.reductions.sum(_whole(values) * chosen, dtype=types.INT32)
