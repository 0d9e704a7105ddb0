"""``checkfreq report``: what happened in a directory, as one HTML page, PNG files or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import example, json_option, records_argument
from checkfreq.errors import ConfigError, storage_errors
from checkfreq.store.gc_pause import gc_paused
from checkfreq.store.store import CheckpointStore

if TYPE_CHECKING:
    from checkfreq.story.figures import Figures
    from checkfreq.story.model import Story


@click.command(
    "report",
    epilog=example(
        "checkfreq report chk/",
        "checkfreq report chk/ --out run.html --png figures/",
        "checkfreq report --json chk/",
    ),
)
@records_argument
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page to write; report.html here if neither this nor --png is given.",
)
@click.option(
    "--png",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write each chart as a PNG file there.",
)
@json_option
def command(store: CheckpointStore, out: Path | None, png: Path | None, as_json: bool) -> int:
    """Tell what happened in a directory, run by run, from its events.

    How far training was when, what was saved, restored and lost, the overhead against its bound,
    the interval, what was written and uploaded. The page needs neither scripts nor a network.
    With --json, the same facts are printed as one document.
    """
    from checkfreq.story.facts import facts
    from checkfreq.story.live import Live

    live = Live(store.root)
    live.reader.require()
    now = live.look()
    if as_json:
        print(text.json_of(facts(live.story, now)))
        return 0
    with gc_paused():
        _require_matplotlib()
        _draw(live.story, now, out=out, png=png, directory=store.root)
    return 0


def _draw(
    story: Story, now: Figures, *, out: Path | None, png: Path | None, directory: Path
) -> None:
    from checkfreq.story.report import writing

    with storage_errors("report: cannot write"):
        if png is not None:
            for path in writing.write_pngs(story, png):
                print(path)
        if out is not None or png is None:
            path = out or Path("report.html")
            writing.write_page(story, now, path, directory=directory)
            print(path)


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "report: expected matplotlib for the charts, found none: pip install "
            "'checkfreq[report]', or print the facts with --json"
        ) from None
