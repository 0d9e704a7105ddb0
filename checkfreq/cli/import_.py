"""``checkfreq import``: what another library saved, as a checkpoint."""

from __future__ import annotations

import click

from checkfreq.cli.arguments import directory_argument, example, json_option
from checkfreq.cli.conversion import CHECKPOINTS, import_, kind_of
from checkfreq.errors import ConfigError
from checkfreq.store.store import CheckpointStore


@click.command(
    "import",
    epilog=example(
        "checkfreq import last.pt chk/ --step 1200",
        "checkfreq import model.safetensors chk/ --name model",
    ),
)
@click.argument("source")
@directory_argument
@click.option("--step", metavar="STEP", help="The step that it gets (default: 0).")
@click.option("--name", help="The object that SOURCE holds, or the one of them to import.")
@click.option("--overwrite", is_flag=True, help="Set aside the step that is there.")
@json_option
def command(
    source: str,
    store: CheckpointStore,
    step: str | None,
    name: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Write a file of torch.save or safetensors, or a folder of DCP or save_pretrained, as a
    checkpoint in DIR.

    Nothing is unpickled but what torch.load(weights_only=True) takes. Refused beside a run. Needs
    PyTorch.
    """
    if kind_of(source) == CHECKPOINTS:
        raise ConfigError(
            f"{source}: expected a file or folder of another library, found checkpoints: "
            "checkfreq export reads those"
        )
    done = import_(source, str(store.root), step=step, name=name, overwrite=overwrite)
    done.tell(as_json=as_json)
    return 0
