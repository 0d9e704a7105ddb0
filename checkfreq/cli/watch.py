"""``checkfreq watch``: how a run is doing now, on a terminal, as a page, for Prometheus."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from checkfreq.cli.arguments import example, json_option, records_argument
from checkfreq.errors import ConfigError, storage_errors
from checkfreq.store.store import CheckpointStore

if TYPE_CHECKING:
    from checkfreq.story.figures import Figures


_TOKEN = re.compile("[A-Za-z0-9_-]{16,200}")


@click.command(
    "watch",
    epilog=example(
        "checkfreq watch chk/",
        "checkfreq watch --once --json chk/",
        "checkfreq watch --http 8123 chk/",
        "checkfreq watch --textfile /var/lib/node_exporter/checkfreq.prom chk/",
    ),
)
@records_argument
@click.option("--once", is_flag=True, help="Print the figures once.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    metavar="S",
    show_default=True,
    help="Seconds between two looks.",
)
@click.option(
    "--http",
    "port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve a page, figures.json and metrics (Prometheus) on 127.0.0.1 instead, at the address "
    "that is printed; 0: any port.",
)
@click.option(
    "--textfile",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep a file for node_exporter's textfile collector (FILE.prom) instead.",
)
@json_option
def command(
    store: CheckpointStore,
    once: bool,
    every_s: float,
    port: int | None,
    textfile: Path | None,
    as_json: bool,
) -> int:
    """Show how a run is doing: the interval, its overhead, what is durable, what is at risk.

    Reads the files of the directory, and costs the training nothing. Between two events the
    iteration is estimated. Ctrl-C ends it. With --json, one object per look.
    """
    from checkfreq.story.live import Live

    live, name = Live(store.root), str(store.root)
    live.reader.require()
    if port is not None:
        return _serve(live.look, name=name, port=port)
    if textfile is not None:
        return _repeat(_writes(live.look, name, textfile), once=once, every_s=every_s)
    if as_json:
        return _repeat(lambda: _print_json(live.look()), once=once, every_s=every_s)
    from checkfreq.story.watch import terminal

    if once:
        print(terminal.plain(live.look(), name=name))
    elif sys.stdout.isatty() and find_spec("rich") is not None:
        terminal.show_live(live.look, name=name, every_s=every_s)
    else:
        terminal.print_often(live.look, name=name, every_s=every_s)
    return 0


def _print_json(now: Figures) -> None:
    print(json.dumps(now.to_json()), flush=True)


def _writes(look: Callable[[], Figures], name: str, path: Path) -> Callable[[], None]:
    from checkfreq.helpers.outputs import require_outside
    from checkfreq.story.watch.prometheus import metrics, write_textfile

    require_outside(path, what="--textfile")

    def write() -> None:
        text = metrics(look(), name=name)
        with storage_errors(f"--textfile {path}: cannot write"):
            write_textfile(path, text)

    return write


def _repeat(act: Callable[[], None], *, once: bool, every_s: float) -> int:
    act()
    while not once:
        time.sleep(every_s)
        act()
    return 0


def _serve(look: Callable[[], Figures], *, name: str, port: int) -> int:
    from checkfreq.story.watch.server import WatchServer

    token = os.environ.get("CHECKFREQ_WATCH_TOKEN")
    if token is not None and not _TOKEN.fullmatch(token):
        raise ConfigError(
            "CHECKFREQ_WATCH_TOKEN: expected 16 to 200 letters, digits, - and _, got something else"
        )
    server = WatchServer(look, name=name, port=port, token=token)
    print(server.url, flush=True)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        server.close()
    return 0
