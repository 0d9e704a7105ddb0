"""Types of arguments that verbs share, ``--json``, and the example that ends each help text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from click.shell_completion import CompletionItem

from checkfreq.errors import CheckFreqError, ConfigError, NoCheckpointError
from checkfreq.store.fileops import user_path
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore

if TYPE_CHECKING:
    _Type: TypeAlias = click.ParamType[Any]
else:  # not generic before click 8.4
    _Type = click.ParamType

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|[kKMGTP]i?)B?")
_POWERS = "kMGTP"
_IS_BEST = "best:"


class _Directory(_Type):
    """What `DIRECTORY`, `RECORDS` and `SOURCE` are, by what becomes of a URL."""

    def __init__(self, *, url: Callable[[str], CheckpointSource] | None = None) -> None:
        self.name = "directory" if url is None else "directory or URL"
        self._url = url

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> CheckpointSource:
        if not isinstance(value, str):
            source: CheckpointSource = value
            return source
        if "://" not in value:
            return CheckpointStore(user_path(value))
        if self._url is None:
            verb = "it" if ctx is None else ctx.info_name
            raise ConfigError(f"{verb}: expected a directory, got {value}")
        return self._url(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


def _mirror_at(url: str) -> CheckpointSource:
    from checkfreq.mirror.reader import MirrorReader
    from checkfreq.mirror.settings import Mirror

    return MirrorReader(Mirror(url))


def _directory_for(url: str) -> CheckpointSource:
    """The directory of this machine to which ``CFManager(url)`` commits."""
    from checkfreq.config import CFConfig
    from checkfreq.session.staging import staged

    store = CheckpointStore(staged(url, CFConfig())[0])
    if not store.ops.is_dir(store.root):
        raise NoCheckpointError(
            f"{url}: what happened is recorded in the directory that a run commits to, and for "
            f"this URL this machine has none ({store.root}): give the directory"
        )
    return store


class _Step(_Type):
    """What `STEP` is."""

    name = "step"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if isinstance(value, int) or value.startswith(_IS_BEST):
            step: int | str = value
            return step
        try:
            return step_number(value)
        except ValueError as error:
            self.fail(f"{error}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The steps in the directory that was named before."""
        for given in ctx.params.values():
            if isinstance(given, CheckpointStore):
                try:
                    steps = map(str, reversed(given.steps()))
                except (CheckFreqError, OSError):
                    return []
                return [CompletionItem(step) for step in steps if step.startswith(incomplete)]
        return []


class Parsed(_Type):
    """A type made of a function from text, whose ValueError says what was expected."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{error}", param, ctx)


def step_number(text: str) -> int:
    """``1200``, or a directory name as a shell completes it: ``step-00001200/``."""
    digits = text.rstrip("/").rpartition("/")[2].removeprefix("step-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise ValueError(f"expected a step such as 1200, got {text!r}")
    return int(digits)


def num_bytes(given: str) -> int:
    """``200GiB``, ``1.5T`` or a number of bytes."""
    match = _SIZE.fullmatch(given.strip())
    if match is None:
        raise ValueError(f"expected a size such as 200GiB, got {given!r}")
    number, unit = float(match[1]), match[2]
    base = 1024 if unit.endswith("i") else 1000
    power = _POWERS.index(unit[0].replace("K", "k")) + 1 if unit else 0
    return int(number * base**power)


def example(*lines: str) -> str:
    """The ``epilog`` of a verb: what its help ends with. Each line is a command."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])


#: A chk_dir or the URL of a mirror, as a CheckpointSource.
SOURCE = _Directory(url=_mirror_at)
#: A chk_dir, or a URL that was given to a CFManager on this machine, as a CheckpointStore.
RECORDS = _Directory(url=_directory_for)
#: A chk_dir, as a CheckpointStore; ConfigError for a URL.
DIRECTORY = _Directory()
#: 1200 and step-00001200/ as a number; "best:METRIC" as it is (`checkpoints.resolved` finds it).
STEP = _Step()
#: 200GiB as a number of bytes.
SIZE = Parsed("size", num_bytes)

#: ``--json``, passed on as ``as_json``: one document, or for a list one object per line.
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, for other programs."
)
source_argument = click.argument("source", metavar="DIR|URL", type=SOURCE)
records_argument = click.argument("store", metavar="DIR|URL", type=RECORDS)
directory_argument = click.argument("store", metavar="DIR", type=DIRECTORY)
