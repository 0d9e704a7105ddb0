"""A cached profile is used only under its own key; the history does not depend on it."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.pacing.profile_cache import ProfileCache
from checkfreq.policy.failure_rate import FailureRate
from checkfreq.policy.profile import Profile
from checkfreq.types import SnapshotPlace
from tests.policy.runs import CACHED

PROFILE = replace(CACHED, device_copy_s=0.001, place=SnapshotPlace.DEVICE)
KEY = {"batch": 32, "layout": "4f2a", "storage": "ext4 /dev/vda 254:0", "devices": ["H200"]}


@pytest.fixture
def path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    caplog.set_level(logging.INFO)
    return tmp_path / "profile.json"


def changed(path: Path, **parts: Any) -> None:
    """Overwrite parts of the file; None removes one."""
    document = {**json.loads(path.read_text()), **parts}
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def the_line(caplog: pytest.LogCaptureFixture) -> str:
    ((level, text),) = lines(caplog)
    assert level == "INFO"
    return text


# ---- the profile


def test_a_profile_comes_back_under_its_key(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ProfileCache(path).store(KEY, PROFILE)

    assert ProfileCache(path).load(KEY) == PROFILE
    assert lines(caplog) == []
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_another_key_is_refused_by_the_names_of_what_differs(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ProfileCache(path).store({**KEY, "old": 1}, PROFILE)

    assert ProfileCache(path).load({**KEY, "batch": 64, "new": None}) is None
    text = the_line(caplog)
    assert "batch: expected 64, found 32" in text
    assert "new: expected null, found nothing" in text
    assert "old: expected nothing, found 1" in text
    assert "layout" not in text


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, None), ("1", 1), ([], {})])
def test_entries_that_only_python_takes_for_equal_are_not(path: Path, one: Any, other: Any) -> None:
    ProfileCache(path).store({"entry": one}, PROFILE)
    assert ProfileCache(path).load({"entry": other}) is None


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"format_version": 2}, "expected format_version 1"),
        ({"key": None}, "lacks its key"),
        ({"profile": "fast"}, "its profile"),
        ({"profile": {**PROFILE.to_dict(), "iteration_s": 10**400}}, "iteration_s"),
        ({"history": {"running_s": 1.0, "failures": 1}}, "history"),
        ({"history": {"running_s": -1.0, "failures": 1, "open": True, "lasted": True}}, "history"),
    ],
)
def test_a_file_with_a_wrong_part_is_refused_in_one_line(
    path: Path, caplog: pytest.LogCaptureFixture, parts: dict[str, Any], reason: str
) -> None:
    ProfileCache(path).store(KEY, PROFILE)
    changed(path, **parts)

    assert ProfileCache(path).load(KEY) is None
    assert reason in the_line(caplog)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]", b"[" * 100_000])
def test_a_file_that_is_something_else_is_refused_in_one_line(
    path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path.write_bytes(content)
    cache = ProfileCache(path)
    assert cache.load(KEY) is None
    cache.opened()
    assert cache.load(KEY) is None
    assert "started anew" in the_line(caplog)
    assert json.loads(path.read_text())["history"]["open"] is True


def test_a_file_that_cannot_be_written_is_one_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir()
    (path / "in the way").touch()
    cache = ProfileCache(path)
    cache.opened()
    cache.store(KEY, PROFILE)
    cache.note_running(1.0)

    assert cache.load(KEY) == PROFILE
    assert [level for level, _ in lines(caplog)] == ["INFO", "WARNING"]
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_a_discarded_profile_is_gone_and_said_why(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ProfileCache(path).store(KEY, PROFILE)
    cache = ProfileCache(path)
    cache.discard("iterations take twice as long")

    assert cache.load(KEY) is None
    assert ProfileCache(path).load(KEY) is None
    assert "iterations take twice as long" in the_line(caplog)


def test_what_a_crash_left_half_written_is_not_read(path: Path) -> None:
    ProfileCache(path).store(KEY, PROFILE)
    (path.parent / ".profile.json.new").write_text("{half")
    cache = ProfileCache(path)
    assert cache.load(KEY) == PROFILE
    cache.store(KEY, PROFILE)
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


# ---- the history


def run(path: Path, seconds: float, *, clean: bool) -> None:
    """One run in the directory, noted twice."""
    cache = ProfileCache(path)
    cache.opened()
    cache.note_running(seconds / 2)
    cache.note_running(seconds)
    if clean:
        cache.closed()


def test_time_between_failures_is_running_time_over_failures(path: Path) -> None:
    run(path, 100.0, clean=False)
    run(path, 200.0, clean=True)
    run(path, 300.0, clean=False)
    run(path, 400.0, clean=False)
    now = ProfileCache(path)
    now.opened()  # the third failure is known only now
    assert now.failures() == FailureRate(3, 1000.0)
    now.note_running(500.0)
    assert now.failures() == FailureRate(3, 1500.0)  # this run has not failed


def test_a_run_that_goes_on_after_its_end_was_asked_for_has_not_failed(path: Path) -> None:
    cache = ProfileCache(path)
    cache.opened()
    cache.note_running(100.0)
    cache.closed()  # a stop signal; then it is killed before its last checkpoint is durable
    cache.note_running(130.0)
    assert ProfileCache(path).failures() == FailureRate(0, 130.0)


@pytest.mark.parametrize("seconds", [float("nan"), 30.0])
def test_running_time_only_grows(path: Path, seconds: float) -> None:
    cache = ProfileCache(path)
    cache.opened()
    cache.note_running(60.0)
    cache.note_running(seconds)
    assert json.loads(path.read_text())["history"]["running_s"] == 60.0


def test_the_history_survives_another_key_and_a_discarded_profile(path: Path) -> None:
    for _ in range(3):
        run(path, 100.0, clean=False)
    cache = ProfileCache(path)
    cache.opened()
    cache.store(KEY, PROFILE)
    cache.store({**KEY, "batch": 64}, PROFILE)
    cache.discard("off")

    assert ProfileCache(path).failures().mtbf_s == 100.0


# ---- whatever is in the file

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = {name: st.just(value) | VALUES for name, value in PROFILE.to_dict().items()}
HISTORY = st.fixed_dictionaries(
    {}, optional={"running_s": VALUES, "failures": VALUES, "open": st.booleans() | VALUES}
)
DOCUMENTS = st.fixed_dictionaries(
    {"format_version": st.just(1) | VALUES},
    optional={
        "key": st.just(KEY) | VALUES,
        "profile": st.fixed_dictionaries({}, optional=FIELDS) | VALUES,
        "history": HISTORY | VALUES,
    },
)
CONTENTS = st.binary(max_size=60) | (DOCUMENTS | VALUES).map(lambda d: json.dumps(d).encode())


def check_everything(path: Path, key: dict[str, Any]) -> Profile | None:
    """Nothing raises, and afterwards the file is one of ours."""
    cache = ProfileCache(path)
    found = cache.load(key)
    cache.opened()
    cache.note_running(1.0)
    rate = cache.failures()
    assert rate.mtbf_s is None or rate.mtbf_s > 0
    rate.facts()
    assert rate.explain()
    assert ProfileCache(path).load(key) == found
    cache.discard("tried")
    cache.store(KEY, PROFILE)
    cache.closed()
    assert ProfileCache(path).load(KEY) == PROFILE
    return found


@given(content=CONTENTS)
def test_nothing_raises_whatever_the_file_holds(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_bytes(content)
        check_everything(path, KEY)


@given(data=st.data())
def test_a_torn_file_yields_its_profile_or_none(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        ProfileCache(path).store(KEY, PROFILE)
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        assert check_everything(path, KEY) in (PROFILE, None)
