"""``Mirror``: where committed checkpoints are copied to, how often, and how fast.

`Mirror.of` is what ``CFConfig(mirror=...)`` accepts. `open_store` connects; it imports obstore,
which nothing else here needs, so that a run without a mirror does not. Credentials come from the
client's usual chain (environment, web identity, instance metadata) or from ``options``. They are
part of no ``repr``, log line or error: see `scrub`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from checkfreq.errors import ConfigError
from checkfreq.policy.retention import RetentionPolicy
from checkfreq.types import Json

if TYPE_CHECKING:
    from obstore.store import ObjectStore

#: Schemes that obstore knows, and that hold objects. HTTPStore (WebDAV) cannot list or create.
SCHEMES = frozenset({"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file", "memory"})
#: How the names of a service's environment variables begin.
_PREFIXES = {
    **dict.fromkeys(("s3", "s3a"), "AWS"),
    "gs": "GOOGLE",
    **dict.fromkeys(("az", "adl", "azure", "abfs", "abfss"), "AZURE"),
}
_HAVE_NO_BUCKET = ("file", "memory")
#: S3 refuses smaller parts of a multipart upload, except the last.
LEAST_PART_BYTES = 5 << 20
#: Options of the HTTP client; all others are of the store (endpoint, region, keys).
_CLIENT_OPTIONS = frozenset(
    {
        *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type"),
        *("default_headers", "http1_only", "http2_keep_alive_interval", "http2_keep_alive_timeout"),
        *("http2_keep_alive_while_idle", "http2_only", "pool_idle_timeout", "proxy_url"),
        *("pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "read_timeout"),
        *("randomize_addresses", "root_certificate", "timeout", "user_agent"),
    }
)
#: Unless options say otherwise: the service compares what arrived, and stores the checksum with the
#: object; and objects are removed one by one, since some servers refuse to remove several at once.
_S3_USUAL = {"checksum_algorithm": "SHA256", "disable_bulk_delete": "true"}
#: A request that sends a part slower than this is given up, and tried again.
_SLOWEST_BYTES_PER_S = 100_000
_LEAST_TIMEOUT_S = 60
#: Within one call: short troubles of a server. Longer ones are the caller's, at longer pauses.
_RETRIES = 4
_RETRY_FOR_S = 60

_SECRET_NAME = re.compile(r"key|secret|token|password|sas|credential", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    r"(AWS|AZURE|GOOGLE|GCP|GCS)_.*(KEY|SECRET|TOKEN|PASSWORD|SAS)", re.IGNORECASE
)
_SIGNED = re.compile(
    r"\b(sig|signature|X-Amz-(?:Signature|Credential|Security-Token))(=|%3D)[^&\s\"'<>]+",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(://)[^/\s@\"']+@")
#: A value shorter than this is no secret, and may be any word of a message.
_LEAST_SECRET = 6


@dataclass(frozen=True, slots=True)
class Mirror:
    """An object store that receives the committed checkpoints of a run.

    url: ``s3://bucket/prefix``, ``gs://...``, ``az://...`` or ``file:///...``. One run at a time.
    every_s: at least this many seconds from the start of one upload to the start of the next.
        Default None: the next begins as soon as one is done.
    retention: which checkpoints are kept there. Default None: the run's own ``retention``.
    max_bytes_per_s: limit on the upload rate. Default None: no limit.
    part_bytes: most bytes of one request, at least 5 MiB. Default 16 MiB.
    wait_on_close_s: how long the end of a run waits until its last checkpoint is uploaded.
        Default 300.
    options: settings of the client by name, such as ``endpoint``, ``region`` or ``allow_http``.

    Raises ConfigError for a value out of range.
    """

    url: str
    every_s: float | None = None
    retention: RetentionPolicy | None = None
    max_bytes_per_s: int | None = None
    part_bytes: int = 16 << 20
    wait_on_close_s: float = 300.0
    options: Mapping[str, str | bool | int | float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))
        every_s = 0.0 if self.every_s is None else self.every_s
        self._require("every_s", math.isfinite(every_s) and every_s >= 0, "None or seconds >= 0")
        rate = self.max_bytes_per_s
        self._require("max_bytes_per_s", rate is None or rate > 0, "None or more than 0 bytes")
        large = self.part_bytes >= LEAST_PART_BYTES
        self._require("part_bytes", large, f"at least {LEAST_PART_BYTES}")
        wait_s = self.wait_on_close_s
        self._require("wait_on_close_s", math.isfinite(wait_s) and wait_s >= 0, "seconds >= 0")
        prunes = self.retention is None or callable(getattr(self.retention, "to_remove", None))
        self._require("retention", prunes, "None or a retention policy")
        for name, value in dict(self.options or {}).items():
            if not isinstance(name, str) or not isinstance(value, str | bool | int | float):
                raise ConfigError(
                    f"Mirror.options[{name!r:.80}]: expected a text, a number or a truth value, "
                    f"got a {type(value).__name__}"
                )

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"Mirror.{name}: expected {expected}, got {getattr(self, name)!r}")

    @staticmethod
    def of(value: str | Mirror | None) -> Mirror | None:
        """What ``CFConfig.mirror`` means: None, a URL, or a Mirror. ConfigError for the rest."""
        if value is None or isinstance(value, Mirror):
            return value
        if isinstance(value, str):
            return Mirror(value)
        raise ConfigError(
            f"CFConfig.mirror: expected None, a URL or a Mirror, got a {type(value).__name__}"
        )

    def for_node(self, rank: int) -> Mirror:
        """The mirror of one of several directories of a run, the one that ``rank`` leads."""
        return dataclasses.replace(self, url=f"{self.url}/node-{rank}")

    def to_json(self) -> Json:
        """Everything that the worker needs: all but the retention, which the trainer decides."""
        names = [one.name for one in dataclasses.fields(self) if one.name != "retention"]
        return {name: getattr(self, name) for name in names}

    @staticmethod
    def from_json(value: Json) -> Mirror:
        """The inverse of `to_json`."""
        return Mirror(**value)

    def scrub(self, text: str) -> str:
        """``text`` without credentials: see `scrub`."""
        return scrub(text, self.options)


def is_url(text: str) -> bool:
    """Whether ``text`` names an object store rather than a directory."""
    return "://" in text


def checked_url(url: str) -> str:
    """``url`` without a slash at its end; ConfigError if it names no place in an object store."""
    if not isinstance(url, str):
        raise ConfigError(f"mirror URL: expected a text, got a {type(url).__name__}")
    parts = urlsplit(url)
    shown = repr(scrub(url))
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"mirror URL {shown}: expected s3://, gs://, az:// or file:///, got {parts.scheme!r}. "
            "For a server that speaks S3: s3://bucket/prefix and options={'endpoint': 'http://...'}"
        )
    if parts.scheme not in _HAVE_NO_BUCKET and not parts.netloc:
        raise ConfigError(f"mirror URL {shown}: expected a bucket after {parts.scheme}://")
    if parts.scheme in _HAVE_NO_BUCKET and (parts.netloc or not parts.path.strip("/")):
        raise ConfigError(f"mirror URL {shown}: expected {parts.scheme}:/// and an absolute path")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(
            f"mirror URL {shown}: expected no query, fragment or user. Give settings as options="
        )
    names = parts.path.rstrip("/").split("/")[1:]
    if not all(name.isprintable() and name not in ("", ".", "..") for name in names):
        raise ConfigError(f"mirror URL {shown}: expected names between single slashes")
    return url.rstrip("/")


def open_store(mirror: Mirror) -> ObjectStore:
    """The client's store at the mirror's URL; nothing is sent yet.

    Raises ConfigError if obstore is missing, or refuses the options.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigError(
            f"CFConfig.mirror needs the package obstore ({error}): pip install 'checkfreq[mirror]'"
        ) from None
    scheme = urlsplit(mirror.url).scheme
    if scheme == "file":
        return from_url(mirror.url, mkdir=True)
    if scheme == "memory":
        return from_url(mirror.url)
    config, client = _options(mirror, scheme)
    retry: Any = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=_RETRY_FOR_S),
        "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5)},
    }
    connect: Callable[..., ObjectStore] = from_url  # its overloads want to know which store it is
    try:
        return connect(mirror.url, config=config, client_options=client, retry_config=retry)
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot use mirror {mirror.url}: {mirror.scrub(str(error))}") from None


def _options(mirror: Mirror, scheme: str) -> tuple[Any, Any]:
    """Settings of the store and of its HTTP client."""
    given = dict(mirror.options or {})
    timeout_s = max(_LEAST_TIMEOUT_S, mirror.part_bytes // _SLOWEST_BYTES_PER_S)
    client: dict[str, Any] = {"connect_timeout": timedelta(seconds=10)}
    client["timeout"] = timedelta(seconds=timeout_s)
    client |= _client_environment(scheme)
    client |= {name: value for name, value in given.items() if name in _CLIENT_OPTIONS}
    config = {name: value for name, value in given.items() if name not in _CLIENT_OPTIONS}
    if scheme.startswith("s3"):
        for name, value in _S3_USUAL.items():
            if not any(name in one.lower() for one in config):
                config[name] = value
    return config, client


def _client_environment(scheme: str) -> dict[str, str]:
    """What the environment says of the HTTP client (``AWS_ALLOW_HTTP``): the client itself reads no
    such variable once it is given any of these settings."""
    prefix = _PREFIXES[scheme]
    named = ((name, f"{prefix}_{name.upper()}") for name in _CLIENT_OPTIONS - {"default_headers"})
    return {name: os.environ[variable] for name, variable in named if variable in os.environ}


def scrub(text: str, options: Mapping[str, Any] | None = None) -> str:
    """``text`` with credentials replaced: those in ``options`` and in the environment, and signed
    parts of URLs."""
    given = dict(options or {}).items()
    secrets = {str(value) for name, value in given if _SECRET_NAME.search(name)}
    secrets |= {value for name, value in os.environ.items() if _SECRET_VARIABLE.fullmatch(name)}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_SECRET:
            text = text.replace(secret, "***")
    return _USER_INFO.sub(r"\1***@", _SIGNED.sub(r"\1\2***", text))
