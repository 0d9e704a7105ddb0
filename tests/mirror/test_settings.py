"""What a mirror may be given, and what it never shows."""

from __future__ import annotations

from typing import Any

import pytest

from checkfreq.errors import ConfigError
from checkfreq.mirror.settings import Mirror, open_store, scrub

SECRET = "wJalrXUtnFEMI-K7MDENG"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("chk/", "expected s3://"),
        ("http://host/x", "endpoint"),
        ("s3://user:password@bucket/x", "no query, fragment or user"),
        ("s3://bucket/../x", "single slashes"),
        ("file:///", "absolute path"),
    ],
)
def test_a_url_that_names_no_place_in_an_object_store_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        Mirror(url)
    assert "password" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"every_s": -1.0},
        {"max_bytes_per_s": 0},
        {"wait_on_close_s": float("inf")},
        {"options": {"endpoint": object()}},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"Mirror.{next(iter(changes))}"):
        Mirror("s3://bucket/x", **changes)  # type: ignore[arg-type]


def test_settings_arrive_in_the_worker_as_they_were() -> None:
    mirror = Mirror("s3://bucket/x", every_s=3.0, options={"endpoint": "http://h", "a": True})
    assert Mirror.from_json(mirror.to_json()) == mirror
    assert mirror.for_node(4).url == "s3://bucket/x/node-4"


def test_an_option_that_the_client_does_not_know_is_an_error_without_its_value() -> None:
    mirror = Mirror("s3://bucket/x", options={"not_an_option": "1", "secret_access_key": SECRET})
    with pytest.raises(ConfigError, match="not_an_option") as error:
        open_store(mirror)
    assert SECRET not in str(error.value)


def test_credentials_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token-of-the-test")
    mirror = Mirror("s3://bucket/x", options={"secret_access_key": SECRET})
    assert SECRET not in repr(mirror)
    signed = "https://h/x?X-Amz-Signature=abcdef0123&sig=zzz&other=1"
    text = f"{SECRET} session-token-of-the-test {signed} http://user:pw@host/"
    shown = mirror.scrub(text)
    for secret in (SECRET, "session-token", "abcdef0123", "zzz", "user:pw"):
        assert secret not in shown
    assert "other=1" in shown
    assert scrub("nothing to hide") == "nothing to hide"


def client_options(mirror: Mirror) -> dict[str, Any]:
    store: Any = open_store(mirror)
    return dict(store.client_options)


def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_TIMEOUT", "7s")
    client = client_options(Mirror("s3://bucket/run"))
    assert (client["allow_http"], client["timeout"]) == ("true", "7s")
    client = client_options(Mirror("s3://bucket/run", options={"allow_http": False}))
    assert client["allow_http"] == "false"
    assert "allow_http" not in client_options(Mirror("gs://bucket/run"))
