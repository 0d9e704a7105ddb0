"""What copies in an object store cost in a month. Pure.

The defaults are AWS's list prices of S3 Standard in us-east-1 (https://aws.amazon.com/s3/pricing/,
2025): dollars for a GB-month, for a thousand writes and for a thousand reads. Bytes into S3 are
free, and so are bytes to machines of the same region; elsewhere a GB out costs about 0.09.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import is_amount
from checkfreq.simulation.planning import DAY_S, MONTH_DAYS, Checkpoint, Outlook

_GB = 1e9
#: Pieces have at least so many bytes (checkfreq/mirror/pieces.py); larger ones are sent in parts.
_LEAST_PIECE_BYTES = 8 << 20
#: The manifest, the marker, and the claim.
_SMALL_OBJECTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars, or any other currency."""

    gb_month: float = 0.023
    thousand_writes: float = 0.005
    thousand_reads: float = 0.0004
    gb_out: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not is_amount(getattr(self, field.name)):
                raise ConfigError(
                    f"price {field.name}: expected a finite number >= 0, got "
                    f"{getattr(self, field.name)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The costs of 30 days. Stored are ``num_kept`` whole checkpoints."""

    uploads_per_day: float
    stored_bytes: int
    storage: float
    writes: float
    restores: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.storage + self.writes + self.restores


def bill(
    checkpoint: Checkpoint,
    plan: Outlook,
    prices: Prices,
    *,
    num_kept: int,
    every_s: float = 0.0,
) -> Bill:
    """A month's costs; ``every_s``: the least time from one upload to the next (Mirror.every_s).

    Without it every checkpoint is uploaded: the most that it can be. Each failure reads a
    checkpoint once. The number of requests is an upper limit: pieces may be larger.
    """
    if not is_amount(every_s):
        raise ConfigError(f"upload every: expected finite seconds >= 0, got {every_s}")
    if num_kept < 1:
        raise ConfigError(f"kept checkpoints: expected at least 1, got {num_kept}")
    uploads = min(plan.checkpoints_per_day, DAY_S / every_s if every_s else math.inf)
    writes = math.ceil(checkpoint.written_bytes / _LEAST_PIECE_BYTES) + _SMALL_OBJECTS
    reads = math.ceil(checkpoint.num_bytes / _LEAST_PIECE_BYTES) + _SMALL_OBJECTS
    restores = MONTH_DAYS * DAY_S / plan.mtbf_s
    stored = num_kept * checkpoint.num_bytes
    return Bill(
        uploads_per_day=uploads,
        stored_bytes=stored,
        storage=stored / _GB * prices.gb_month,
        writes=MONTH_DAYS * uploads * writes / 1000 * prices.thousand_writes,
        restores=restores
        * (reads / 1000 * prices.thousand_reads + checkpoint.num_bytes / _GB * prices.gb_out),
    )
