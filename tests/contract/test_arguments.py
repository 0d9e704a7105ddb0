"""The contract's signatures, defaults and modes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from checkfreq.errors import ConfigError
from checkfreq.policy.retention import DEFAULT_RETENTION
from iterators import CFIterator
from tests.contract.runs import loader, managed, running, train

CHK = CFCheckpoint(model=torch.nn.Linear(1, 1))

DEFAULTS = {
    "mode": CFMode.AUTO,
    "chk_freq": None,
    "max_overhead": 0.035,
    "dynamic": True,
    "mtbf_s": None,
    "retention": DEFAULT_RETENTION,
    "tolerate_failures": None,
    "fresh": False,
    "config": CFConfig(),
}


def test_the_manager_takes_two_positional_arguments_and_these_keywords() -> None:
    found = dict(inspect.signature(CFManager).parameters)
    assert list(found) == ["chk_dir", "chk", *DEFAULTS]
    assert {name: found[name].default for name in DEFAULTS} == DEFAULTS


def test_everything_else_is_a_field_of_cfconfig_with_its_unit_and_default() -> None:
    assert CFConfig.__doc__ is not None
    for field in dataclasses.fields(CFConfig):
        assert field.default is not dataclasses.MISSING, f"{field.name} has no default"
        assert re.search(rf"^ +{field.name}: \w", CFConfig.__doc__, re.M), field.name
        unit = re.search(r"_(s|bytes|bytes_per_s)$", field.name)
        if isinstance(field.default, float) and field.name != "arena_slack":
            assert unit, f"{field.name} does not name its unit"


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ({"num_slots": 0}, "expected at least 1, got 0"),
        ({"write_chunk_bytes": 1000}, "expected a multiple of 4096"),
        ({"takeover_s": float("inf")}, "expected a finite number"),
        ({"host_memory_limit": 0}, "expected None or more than 0"),
        ({"arena_slack": 2.0}, "expected a fraction from 0 to 1"),
        ({"objective": "goodput"}, "expected an Objective, got 'goodput'"),
        ({"summary_writer": 3}, "expected None or an object with add_scalar"),
        ({"snapshot_place": "host"}, "expected None or a SnapshotPlace"),
    ],
    ids=str,
)
def test_a_setting_out_of_its_range_is_a_config_error_naming_it(
    setting: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=rf"CFConfig\.{next(iter(setting))}: {found}"):
        CFConfig(**setting)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"mode": CFMode.AUTO, "chk_freq": 5}, "chk_freq=5 with CFMode.AUTO.*mode=CFMode.MANUAL"),
        ({"mode": "auto"}, "mode: expected a CFMode, got 'auto'"),
        ({"chk_freq": None}, "MANUAL needs chk_freq=N"),
        ({"chk_freq": -1}, "chk_freq: expected a number of iterations >= 0, got -1"),
        ({"max_overhead": 0.0}, "max_overhead: expected a fraction between 0 and 1, got 0"),
        ({"max_overhead": float("nan")}, "max_overhead: expected a fraction.*got nan"),
        ({"mtbf_s": 0.0}, "mtbf_s: expected None or finite seconds > 0, got 0"),
        ({"tolerate_failures": -1}, "tolerate_failures: expected at least 0, got -1"),
        ({"config": CFConfig(stop_signals=("SIGNAL",))}, "stop_signals: .* got 'SIGNAL'"),
        ({"config": CFConfig(stop_signals=("SIGKILL",))}, "stop_signals"),
        ({"chk": {"model": None}}, "chk: expected a CFCheckpoint, got dict"),
    ],
    ids=str,
)
def test_an_argument_out_of_its_range_is_a_config_error_and_starts_nothing(
    chk_dir: Path, argument: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        managed(chk_dir, **{"chk": CHK, **argument})
    assert not (chk_dir / ".lock").exists()


def test_zero_means_epoch_boundaries_and_explicit_saves_only(chk_dir: Path) -> None:
    with running(chk_dir, chk_freq=0, retention=KeepLast(99)) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)

        def save_at_four() -> None:
            if manager.global_step == 4:
                manager.save()

        train(training, manager, iterator, 3, each=save_at_four, tail=manager.wait)
        manager.wait()
        assert manager.all_steps() == [3, 5, 6, 9]


def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/chk"):
        with pytest.raises(ConfigError, match=f"cannot make the checkpoint directory .*{path}"):
            managed(tmp_path / path, CHK)


def test_by_default_the_last_three_and_the_first_of_the_hour_are_kept_and_pinned_ones(
    chk_dir: Path,
) -> None:
    with running(chk_dir, retention=DEFAULT_RETENTION) as (training, manager):
        for _ in range(7):
            training.steps(manager, 1)
            manager.save(wait=True, keep=manager.global_step == 3)
    left = {*steps_on_disk(chk_dir)}
    assert {1, 3, 5, 6, 7} <= left
    assert len(left) <= 6  # where the hour ended during the test, its first one stays too


def steps_on_disk(chk_dir: Path) -> list[int]:
    """Steps after the worker has ended: its last prune is done."""
    return sorted(int(path.name.removeprefix("step-")) for path in chk_dir.glob("step-*"))
