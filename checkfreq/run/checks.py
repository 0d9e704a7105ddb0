"""What CFManager checks of its arguments before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from checkfreq.errors import ConfigError
from checkfreq.policy.cadence import ManualCadence
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.store.store import CheckpointStore
from checkfreq.types import CFMode


def cadence(mode: CFMode, chk_freq: int | None) -> ManualCadence | None:
    """When checkpoints are due; None if the costs decide (CFMode.AUTO).

    Raises ConfigError for a mode and a frequency that do not fit.
    """
    if not isinstance(mode, CFMode):
        raise ConfigError(f"mode: expected a CFMode, got {mode!r}")
    if mode is CFMode.AUTO:
        if chk_freq is not None:
            raise ConfigError(
                f"chk_freq={chk_freq} with CFMode.AUTO, which chooses the interval itself: pass "
                "mode=CFMode.MANUAL with it, or leave it out"
            )
        return None
    if chk_freq is None:
        raise ConfigError("CFMode.MANUAL needs chk_freq=N, the iterations between checkpoints")
    return ManualCadence(chk_freq)


def check_arguments(chk: CFCheckpoint, *, tolerate_failures: int | None) -> None:
    """ConfigError for a value out of its range."""
    if not isinstance(chk, CFCheckpoint):
        raise ConfigError(f"chk: expected a CFCheckpoint, got {type(chk).__name__}")
    if tolerate_failures is not None and tolerate_failures < 0:
        raise ConfigError(
            f"tolerate_failures: expected at least 0, got {tolerate_failures}; None tolerates any"
        )


def numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as floats (0-d tensors are welcome); ConfigError for anything else.

    NaN and infinities are kept as they are: a loss that diverged is worth knowing.
    """
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"save(metrics=...): expected numbers by name, got {metrics}") from error


def usable(chk_dir: Path) -> Path:
    """Make the directory, durably; ConfigError where nothing could ever be written.

    Returns where it is, whatever directory the process goes to and wherever links lead later.
    """
    try:
        CheckpointStore(chk_dir).make()
        chk_dir = Path(os.path.realpath(chk_dir, strict=True))
    except OSError as error:
        raise ConfigError(f"cannot make the checkpoint directory {chk_dir}: {error}") from error
    if not os.access(chk_dir, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the checkpoint directory {chk_dir} is not writable; mount it read-write, or change "
            "its owner or mode"
        )
    return chk_dir
