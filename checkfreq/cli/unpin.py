"""``checkfreq unpin``: leave checkpoints to retention again."""

from __future__ import annotations

import click

from checkfreq.cli.arguments import STEP, example, json_option, source_argument
from checkfreq.cli.pinning import set_pins
from checkfreq.store.source import CheckpointSource


@click.command("unpin", epilog=example("checkfreq unpin chk/ 1200"))
@source_argument
@click.argument("steps", metavar="STEP ...", type=STEP, nargs=-1, required=True)
@json_option
def command(source: CheckpointSource, steps: tuple[int | str, ...], as_json: bool) -> int:
    """Unpin checkpoints: what retention does not keep is removed at the next commit or prune.

    STEP is 1200, step-00001200/ or best:METRIC[:max|:min]. Refused beside a run.
    """
    return set_pins(source, steps, keep=False, as_json=as_json)
