"""The key that extra state is saved with: made once, of this user alone."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkfreq.state.origin import _key, code_of
from tests.users import another_effective_user, public_folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home in which there is no key yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield tmp_path
    _key.cache_clear()


def code(value: object = 1, name: str = "m._extra_state") -> str:
    return code_of(value, name)


def test_the_key_is_made_once_for_this_user_alone_and_said_in_a_container_as_a_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    first = code()
    _key.cache_clear()
    assert code() == first
    key = home / "checkfreq" / "key"
    assert (len(key.read_bytes()), stat.S_IMODE(key.stat().st_mode)) == (32, 0o600)
    (said,) = caplog.messages
    assert "set CFConfig(trust_extra_state=True)" in said
    key.write_bytes(b"short")  # cut off: made anew
    _key.cache_clear()
    assert code() not in ("", first)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(4), -torch.zeros(4)),
        ([torch.zeros(4)], (torch.zeros(4),)),
        ({"a": b"x"}, {"a": b"y"}),
        (torch.zeros(2).to_sparse(), torch.ones(2).to_sparse()),
    ],
)
def test_every_difference_of_a_value_is_one_of_its_code(
    one: object, other: object, home: Path
) -> None:
    assert code(one) == code(one) != code(other)
    assert code(one, "m.other._extra_state") != code(one)


def test_a_home_that_cannot_be_written_to_gives_no_code_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with public_folder() as folder:
        monkeypatch.setenv("XDG_STATE_HOME", str(folder))
        with another_effective_user():
            assert code() == ""
    _key.cache_clear()
    (said,) = caplog.messages
    assert "cannot be made" in said
    assert "CFConfig(trust_extra_state=True)" in said


def test_a_key_that_another_user_planted_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with public_folder(0o777) as folder:
        (folder / "checkfreq").mkdir()
        key = folder / "checkfreq" / "key"
        key.write_bytes(bytes(32))
        key.chmod(0o666)
        monkeypatch.setenv("XDG_STATE_HOME", str(folder))
        with another_effective_user():
            assert code() == ""
    _key.cache_clear()
    assert "it is user 0's, and others may read it" in caplog.text
