"""Programs that use large frameworks, for ranks: imported in a rank's process, not by the tests.

The fork server has them imported; the test's own process, where warnings are errors, never has.
"""

from __future__ import annotations

import warnings

from tests.acceptance.ranks import Rank


def train_trainer(here: Rank) -> None:
    """A run of Hugging Face's Trainer."""
    import tests.integrations.vision  # noqa: F401  # first
    from tests.integrations.trainers import train

    train(here)


def refuse_trainer(here: Rank) -> None:
    """What the callback for the Trainer refuses."""
    import tests.integrations.vision  # noqa: F401  # first
    from tests.integrations.trainers import refuse

    refuse(here)


def keep_callbacks(here: Rank) -> None:
    """Callbacks of the Trainer with a state, in two lives of a run."""
    import tests.integrations.vision  # noqa: F401  # first
    from tests.integrations.trainers import keep

    keep(here)


def train_lightning(here: Rank) -> None:
    """A run of Lightning's Trainer."""
    warnings.simplefilter("ignore")  # Lightning's own, also at its import
    from tests.integrations.lightning.program import live

    live(here)


def train_accelerated(here: Rank) -> None:
    """A loop written with accelerate."""
    from tests.integrations.accelerated import train

    train(here)
