"""``checkfreq pin``: keep checkpoints, whatever retention says."""

from __future__ import annotations

import click

from checkfreq.cli.arguments import STEP, directory_argument, example, json_option
from checkfreq.cli.pinning import set_pins
from checkfreq.store.store import CheckpointStore


@click.command(
    "pin", epilog=example("checkfreq pin chk/ 1200", "checkfreq pin chk/ 1200 2400 best:loss")
)
@directory_argument
@click.argument("steps", metavar="STEP ...", type=STEP, nargs=-1, required=True)
@json_option
def command(store: CheckpointStore, steps: tuple[int | str, ...], as_json: bool) -> int:
    """Pin checkpoints: neither a run nor checkfreq prune removes them.

    STEP is 1200, step-00001200/ or best:METRIC[:max|:min]. Refused beside a run, which would not
    learn of it: let the run pin what it saves, with cf_manager.save(keep=True). What else can be
    done is said.
    """
    return set_pins(store, steps, keep=True, as_json=as_json)
