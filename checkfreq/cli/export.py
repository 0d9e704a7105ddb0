"""``checkfreq export``: a checkpoint as a file or folder of another library."""

from __future__ import annotations

import click

from checkfreq.cli.arguments import example, json_option
from checkfreq.cli.conversion import CHECKPOINTS, export, kind_of, to_option
from checkfreq.errors import ConfigError


@click.command(
    "export",
    epilog=example(
        "checkfreq export chk/ model.safetensors --name model",
        "checkfreq export chk/ hub/ --to pretrained --name model --step best:loss",
        "checkfreq export s3://bucket/run last.pt",
    ),
)
@click.argument("source", metavar="DIR|URL")
@click.argument("target")
@to_option
@click.option("--step", metavar="STEP", help="Which checkpoint (default: the newest valid one).")
@click.option("--name", help="The object to export alone, such as model.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
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
    """Write a checkpoint as a file of torch.save or safetensors, or a folder of DCP or
    save_pretrained.

    What is read is verified; TARGET appears whole or not at all. The format follows from its name
    (.pt, .pth, .bin, .ckpt, .safetensors) or from --to. Needs PyTorch.
    """
    if kind_of(source) != CHECKPOINTS:
        raise ConfigError(
            f"{source}: expected a directory of checkpoints, found files of another library: "
            "checkfreq import reads those"
        )
    done = export(source, target, to=to, step=step, name=name, overwrite=overwrite)
    done.tell(as_json=as_json)
    return 0
