"""Hugging Face's ``Trainer`` with our callback, killed and resumed; and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.ranks import Life, run_well
from tests.integrations.killing import Event, run_killed
from tests.integrations.programs import keep_callbacks, refuse_trainer, train_trainer
from tests.patience import slowness

pytestmark = [pytest.mark.more, pytest.mark.crash]

NUM_SAMPLES = 46


def samples_of(events: list[list[Event]], *, per_epoch: int) -> list[list[int]]:
    """The sample ids that all ranks used, by epoch, of the batches that ``per_epoch`` make one."""
    epochs: list[list[int]] = []
    for rank in events:
        batches = [data[0] for kind, _, data in rank if kind == "batch"]
        for number, ids in enumerate(batches):
            if number // per_epoch == len(epochs):
                epochs.append([])
            epochs[number // per_epoch] += ids
    return epochs


@pytest.mark.parametrize(
    ("case", "world", "per_epoch"),
    [("epochs", 1, 12), ("steps", 1, 8), pytest.param("ranks", 2, 6, marks=pytest.mark.dist)],
)
def test_a_killed_trainer_ends_with_the_bits_of_one_never_killed(
    case: str, world: int, per_epoch: int, tmp_path: Path
) -> None:
    # A successor may wait so long for parts that nobody will write any more.
    config = {"rank_timeout_s": 4.0 * slowness()} if world > 1 else {}
    whole = run_killed(train_trainer, tmp_path, world=world, seed=1, case=case, config=config)
    epochs = samples_of(whole, per_epoch=per_epoch)
    assert len(epochs) >= 4
    assert all(sorted(one) == list(range(NUM_SAMPLES)) for one in epochs[:3])


def test_what_cannot_be_exact_is_refused_with_the_reason(tmp_path: Path) -> None:
    heard = run_well(Life(refuse_trainer, tmp_path, 1))[0]
    refused = {what: (kind, text) for what, kind, text in heard.all("refused")}
    expected = {
        "resume_from_checkpoint": ("ConfigError", "two checkpoints would decide"),
        "auto_find_batch_size": ("ConfigError", "another batch size"),
        "ignore_data_skip": ("ConfigError", "uses samples of the epoch twice"),
        "a sampler of its own": ("NotResumableError", "LengthGroupedSampler"),
        "loader": ("NotResumableError", "in_order=True"),
        "added late": ("ConfigError", "attach(trainer) before train()"),
        "a second Trainer": ("ConfigError", "one callback belongs to one Trainer"),
    }
    assert refused.keys() == expected.keys()
    for what, (kind, part) in expected.items():
        assert refused[what][0] == kind
        assert part in refused[what][1]
    assert heard.last("attached") == 2


def test_callbacks_keep_their_state_and_the_arguments_that_they_have_changed(
    tmp_path: Path,
) -> None:
    heard = run_well(Life(keep_callbacks, tmp_path, 1))[0]
    states = dict(heard.all("state"))
    assert states[2] == {"args": {"scale": 0.25, "factor": 0.5}, "attributes": {"count": 2}}
    # The factor is the script's: nothing has changed it.
    assert states[3] == {"args": {"scale": 0.0625, "factor": 0.25}, "attributes": {"count": 3}}
    # ... unless the Trainer is told to take all from the checkpoint.
    assert states[4]["args"] == {"scale": 0.0625 / 4, "factor": 0.25}
    dropped = [text for text in heard.last("heard") if "is dropped" in text]
    assert [text.rpartition(" ")[2] for text in dropped] == ["Lacking"]
