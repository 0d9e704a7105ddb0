"""``checkfreq run``: start a training again that crashed or was killed. Docs: docs/restart.md."""

from __future__ import annotations

import contextlib
import json
import os
import time

import click

from checkfreq.supervisor.supervise import Supervisor

_STDERR = 2


def _count(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise click.BadParameter(f"expected a number of restarts such as 5, got {text!r}")
    return int(text)


@click.command(
    "run",
    options_metavar="[OPTIONS] --",
    # The first word of COMMAND ends our own options, with or without -- before it.
    context_settings={"allow_interspersed_args": False},
    epilog="\b\nExamples:\n  checkfreq run -- python train.py --lr 0.1\n"
    "  checkfreq run --standby -- python -m torch.distributed.run --nproc-per-node 8 train.py",
)
@click.option(
    "--max-restarts",
    metavar="N",
    callback=_count,
    help="How often to start it again (default: as long as its runs make progress).",
)
@click.option(
    "--hang-timeout",
    "hang_timeout_s",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help="Kill a run that passes no boundary for so long, and start it again. Must exceed the "
    "longest start, validation and end of the script.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="Keep a process waiting, with torch imported, that becomes the script at the next start; "
    "the command must be python SCRIPT or python -m MODULE.",
)
@click.option(
    "--standby-import",
    multiple=True,
    metavar="MODULE",
    help="Have the standby import this too; may be given several times.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Report to stderr as JSON, one object per line."
)
@click.argument("words", metavar="COMMAND [ARGUMENT ...]", nargs=-1, type=click.UNPROCESSED)
def command(
    max_restarts: int | None,
    hang_timeout_s: float | None,
    standby: bool,
    standby_import: tuple[str, ...],
    as_json: bool,
    words: tuple[str, ...],
) -> int:
    """Run a training, and start it again after a crash or a kill.

    Exit status: that of the command's last run; 75 if every manager was told to stop, and its last
    checkpoint is durable; 128 + N if signal N ended it; 2 wrong usage; 126 or 127 if the command
    cannot be run.
    """
    if not words or not words[0]:
        raise click.UsageError(
            "expected a command after --, for instance: checkfreq run -- python train.py"
        )
    supervisor = Supervisor(
        [*words],
        environ=os.environ,
        say=_say_json if as_json else _say,
        max_restarts=max_restarts,
        standby=[*standby_import] or ([] if standby else None),
        hang_timeout_s=hang_timeout_s,
    )
    return supervisor.run()


def _say(line: str) -> None:
    _write(f"checkfreq run: {line}")


def _say_json(line: str) -> None:
    _write(json.dumps({"time_unix_s": round(time.time(), 3), "verb": "run", "message": line}))


def _write(line: str) -> None:
    with contextlib.suppress(OSError):  # where nobody reads it any more, training goes on
        os.write(_STDERR, f"{line}\n".encode())
