"""``checkfreq doctor``: what this machine gives a run, what it means, and how to mend it."""

from __future__ import annotations

import getpass
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import SIZE, example, json_option
from checkfreq.errors import ConfigError, NoCheckpointError, printable

if TYPE_CHECKING:
    from checkfreq.doctor.findings import Finding, Section

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 40


@click.command(
    "doctor",
    epilog=example(
        "checkfreq doctor chk/",
        "checkfreq doctor chk/ --mirror s3://bucket/run --page doctor.md",
    ),
)
@click.argument("directory", metavar="[DIR|URL]", required=False)
@click.option("--mirror", metavar="URL", help="Try an object store too: list, write, read, remove.")
@click.option(
    "--size",
    "num_bytes",
    type=SIZE,
    default="256MiB",
    show_default=True,
    metavar="SIZE",
    help="Bytes that are written to DIR and read.",
)
@click.option("--page", metavar="FILE", help="Write a page for a bug report, without secrets.")
@json_option
def command(
    directory: str | None, mirror: str | None, num_bytes: int, page: str | None, as_json: bool
) -> int:
    """Say what this machine gives a run: storage, memory, accelerators, SLURM, an object store.

    Each finding says what it means and, if it is not good, how to mend it. Without DIR nothing is
    written. In DIR, which must exist, a temporary folder is made, tried for some seconds, and
    removed: beside a run, both are slower meanwhile. Exits with 1 if there is a problem that
    keeps checkpoints from being taken.
    """
    if directory is not None and "://" in directory:
        if mirror is not None:
            raise ConfigError(f"doctor: expected one URL, got {directory} and --mirror {mirror}")
        directory, mirror = None, directory
    if not _LEAST_BYTES <= num_bytes <= _MOST_BYTES:
        raise ConfigError(f"--size: expected 1 MiB to 1 TiB, got {num_bytes} bytes")
    from checkfreq.doctor.findings import Status, worst

    sections = []
    for section in _sections(_existing(directory), mirror, num_bytes):
        sections.append(section)
        if not as_json:
            print("\n".join(_lines(section)), flush=True)
    if as_json:
        print(text.json_of({"sections": [section.to_json() for section in sections]}))
    if page is not None:
        _write_page(page, sections, directory or "", mirror or "")
    return 1 if worst(sections) is Status.PROBLEM else 0


def _existing(directory: str | None) -> Path | None:
    if directory is None:
        return None
    path = Path(directory).absolute()
    from checkfreq.store.fileops import LocalFileOps

    ops = LocalFileOps(path)
    if not ops.is_dir(path):
        raise NoCheckpointError(
            f"{directory} is not a directory: make it first, or name the one that it will be in"
        )
    return path


def _sections(directory: Path | None, mirror: str | None, num_bytes: int) -> Iterator[Section]:
    from checkfreq.doctor import accelerators, cluster, machine, remote
    from checkfreq.doctor.findings import Finding, Status, section
    from checkfreq.doctor.storage import Storage

    checks: list[Callable[[], Iterable[Finding]]]
    yield section("versions", machine.versions, lambda: machine.environment(os.environ))
    if directory is None:
        means = "The file system that holds checkpoints decides how often they can be taken."
        mend = "checkfreq doctor DIR, with the chk_dir of the run."
        found = Finding("storage", Status.UNKNOWN, "no directory was named", means, mend)
        checks = [lambda: [found]]
    else:
        storage = Storage(directory, num_bytes=num_bytes)
        checks = [storage.kind, storage.access, storage.room, storage.all]
    yield section("storage", *checks)
    yield section(
        "memory", machine.memory, machine.shared_memory, machine.processors, machine.limits
    )
    yield section(
        "accelerators",
        accelerators.kernel_and_driver,
        accelerators.nvml,
        lambda: accelerators.pinning(min(num_bytes, 1 << 30)),
    )
    yield section("slurm", lambda: cluster.slurm(os.environ))
    if mirror is not None:
        yield section("object store", lambda: remote.object_store(mirror))


def _lines(section: Section) -> Iterator[str]:
    yield click.style(section.name, bold=True) if sys.stdout.isatty() else section.name
    width = max((len(one.name) for one in section.findings), default=0)
    for one in section.findings:
        yield from _said(one, width)
    yield ""


def _said(one: Finding, width: int) -> Iterator[str]:
    status = f"{one.status.value:<9}"
    if sys.stdout.isatty():
        status = click.style(status, fg=_COLOURS.get(one.status.value))
    yield f"  {status}  {one.name:<{width}}  {printable(one.found)}"
    for said in (one.means, one.mend and f"-> {one.mend}"):
        if said:
            yield click.wrap_text(printable(said), 100, " " * 13, " " * 13)


def _write_page(file: str, sections: Iterable[Section], directory: str, url: str) -> None:
    from checkfreq.doctor.page import hidden, page
    from checkfreq.helpers.outputs import write_output

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's number without a name
        user = ""
    endpoints = [value for name, value in os.environ.items() if "ENDPOINT" in name]
    hide = hidden(
        directory=directory and str(Path(directory).absolute()),
        url=url,
        home=str(Path.home()),
        user=user,
        hosts=[
            *(platform.node(), os.environ.get("HOSTNAME", "")),
            *(one.rpartition("//")[2].partition("/")[0].partition(":")[0] for one in endpoints),
        ],
    )
    data = page(sections, hide=hide)
    if file == "-":
        print(data, end="")
        return
    try:
        write_output(Path(file), data.encode(), what="--page")
    except OSError as error:
        raise ConfigError(f"--page {file}: cannot be written: {error.strerror}") from None
    print(f"written to {file}; read it before you send it", file=sys.stderr)
