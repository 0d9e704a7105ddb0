"""``checkfreq convert``: ``export`` or ``import``, whichever the names ask for."""

from __future__ import annotations

import click

from checkfreq.cli.arguments import example, json_option
from checkfreq.cli.conversion import CHECKPOINTS, export, import_, kind_of, to_option
from checkfreq.errors import ConfigError


@click.command(
    "convert",
    epilog=example(
        "checkfreq convert chk/ model.safetensors --name model",
        "checkfreq convert last.pt chk/ --step 1200",
    ),
)
@click.argument("source")
@click.argument("target")
@to_option
@click.option("--step", metavar="STEP", help="Which checkpoint; of an import, the step it gets.")
@click.option("--name", help="The object to convert alone, such as model.")
@click.option("--overwrite", is_flag=True, help="Replace what is there (steps are set aside).")
@json_option
def command(
    source: str,
    target: str,
    to: str | None,
    step: str | None,
    name: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Convert a checkpoint to files of another library, or those to a checkpoint.

    Which way, and which format, follows from the names and from what is in the folders. SOURCE is
    what to read: a chk_dir, or a file; TARGET what to write: a file, or a chk_dir.
    """
    if kind_of(source) == CHECKPOINTS:
        done = export(source, target, to=to, step=step, name=name, overwrite=overwrite)
    elif to is not None:
        raise ConfigError(
            f"--to {to}: expected a directory of checkpoints to convert, found {source}. "
            "Import it first, then convert the checkpoint"
        )
    else:
        done = import_(source, target, step=step, name=name, overwrite=overwrite)
    done.tell(as_json=as_json)
    return 0
