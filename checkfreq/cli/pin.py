"""``checkfreq pin``: keep checkpoints, whatever retention says."""

from __future__ import annotations

import click

from checkfreq.cli.arguments import STEP, example, json_option, source_argument
from checkfreq.cli.pinning import set_pins
from checkfreq.store.source import CheckpointSource


@click.command(
    "pin", epilog=example("checkfreq pin chk/ 1200 best:loss", "checkfreq pin s3://bucket/run 1200")
)
@source_argument
@click.argument("steps", metavar="STEP ...", type=STEP, nargs=-1, required=True)
@json_option
def command(source: CheckpointSource, steps: tuple[int | str, ...], as_json: bool) -> int:
    """Pin checkpoints: neither a run nor checkfreq prune removes them.

    STEP is 1200, step-00001200/ or best:METRIC[:max|:min]. Refused beside a run, which would not
    learn of it: let the run pin what it saves, with cf_manager.save(keep=True). What else can be
    done is said.
    """
    return set_pins(source, steps, keep=True, as_json=as_json)
