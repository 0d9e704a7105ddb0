"""Logs how a restored position differs from the live loader, and that nothing is left to serve.

Only differences that are allowed come here; all others are errors (``Position.require``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from iterators.order.position import Layout, Position
from iterators.protocol import Adapter

logger = logging.getLogger(__name__)

#: Nobody types a larger seed. Where the script sets none, torch's own initial seed has 64 bits.
LARGEST_TYPED_SEED = (1 << 32) - 1


def log_changes(position: Position, adapter: Adapter) -> None:
    """Log a different layout, length or tail, other samples, and a ledger that does not cover the
    place."""
    warn_of_other_samples(position.identity.samples, adapter.identity.samples)
    then, now = position.layout, adapter.layout
    if then != now and then != Layout():
        logger.info(
            "resuming with a different layout: %s; saved with %s", now.to_dict(), then.to_dict()
        )
    counted, served = position.ledger.count, position.position
    n, now_n = position.identity.n, adapter.identity.n
    if n != now_n:
        if served:
            logger.info(
                "epoch %d goes on with the %d samples that it began with; the data has %d now, "
                "which the next epoch will serve unless that changes",
                position.epoch,
                n,
                now_n,
            )
    elif adapter.order(position.epoch) is not None and counted != served:
        logger.warning(
            "the restored position accounts for %d of the %d samples served so far in its epoch, "
            "so the check at the end of the epoch covers only the rest. Was it saved by one rank "
            "of several (merged_state() makes one position of all), or by a sampler?",
            counted,
            served,
        )
    if position.identity.tail != adapter.identity.tail:
        logger.warning(
            "the tail policy is %r; the position was saved with %r",
            adapter.identity.tail,
            position.identity.tail,
        )


def warn_of_other_samples(saved: Mapping[str, str], live: Mapping[str, str]) -> None:
    """Warn if ``saved`` and ``live``, of data with one fingerprint, are not of the same samples."""
    different = [
        place for place, found in live.items() if not _are_same(saved.get(place, found), found)
    ]
    if different:
        logger.warning(
            "the data has the type and length of the run before, but other values in %s. If it is "
            "split or shuffled without a seed, the run goes on on other samples than it began "
            "with: give the split a seed, and start a new run. If the change is meant, name the "
            "data: by a method data_fingerprint() of the dataset, or fingerprint= of the loader",
            ", ".join(different),
        )


def _are_same(digest: str, other: str) -> bool:
    """Whether two of `sample_digests` are of the same values, but for rounding."""
    (exact, *groups), (other_exact, *others) = digest.split("."), other.split(".")
    different = sum(a != b for a, b in zip(groups, others, strict=False))
    return (exact, len(groups)) == (other_exact, len(others)) and 2 * different <= len(groups)


def log_nothing_left(name: str, epochs: int) -> None:
    """Log that a loop over epochs has none left, as after a kill behind the last checkpoint."""
    logger.info(
        "iterator %r: all %d epochs were served before, so nothing is trained: the body of the "
        "loop over them does not run, and variables that only it sets do not exist after it",
        name,
        epochs,
    )


def log_seeds(name: str, position: Position, adapter: Adapter) -> None:
    """Log that the restored run keeps its own seed.

    At level WARNING if the script seems to have set a different one. If it sets none, torch's
    initial seed differs at every start, and the difference means nothing.
    """
    logger.log(
        logging.WARNING if adapter.identity.seed <= LARGEST_TYPED_SEED else logging.INFO,
        "iterator %r: the restored run continues with its own seed, %d, not with this script's, %d "
        "(from torch.manual_seed or the loader's generator). To train with a different seed, start "
        "a new run: in a different directory, or with fresh=True",
        name,
        position.identity.seed,
        adapter.identity.seed,
    )
