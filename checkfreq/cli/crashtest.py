"""``crashtest``: run a script, kill it, start it again, and compare. Docs: docs/crashtest.md."""

from __future__ import annotations

import signal
import sys
from typing import Any

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import Parsed, example, json_option
from checkfreq.errors import ConfigError, printable


def signal_number(given: str) -> int:
    """``KILL``, ``SIGTERM`` or a number."""
    names = {one.name: int(one) for one in signal.Signals}
    name = given.upper()
    number = names.get(name, names.get(f"SIG{name}"))
    if number is None and given.isascii() and given.isdigit() and int(given) in names.values():
        number = int(given)
    if number is None:
        raise ValueError(f"expected a signal such as KILL or TERM, got {given!r}")
    return number


@click.command(
    "crashtest",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=example(
        "checkfreq crashtest -- python train.py --epochs 2",
        "checkfreq crashtest --ranks 2 --kills 8 -- python train.py",
        "checkfreq crashtest --glob '*.pt' -- python own.py --save-to {dir}",
    ),
)
@click.option(
    "--kills",
    type=click.IntRange(1, 1000),
    default=4,
    show_default=True,
    metavar="N",
    help="How often to kill it in training.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, metavar="N", help="Chooses the instants."
)
@click.option(
    "--signal",
    "number",
    type=Parsed("signal", signal_number),
    default="KILL",
    show_default=True,
    metavar="NAME",
    help="The signal: KILL, TERM, ...",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="N",
    help="Start it with torchrun, on N ranks; one of them is killed.",
)
@click.option(
    "--group", is_flag=True, help="Kill every process of the run at once, as a lost machine does."
)
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    help="Of a script that saves by itself: the folder it saves to, empty or not there yet.",
)
@click.option(
    "--glob",
    "pattern",
    metavar="PATTERN",
    help="Of a script that saves by itself: the names of its checkpoints, like '*.pt'.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1.0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="The longest that one start may take.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    metavar="N",
    help="2: the two uninterrupted runs at the same time.",
)
@click.option(
    "--keep", metavar="DIR", help="Put all that is recorded into this new folder, and leave it."
)
@json_option
@click.argument("command_line", metavar="COMMAND [ARGUMENT ...]", nargs=-1)
def command(command_line: tuple[str, ...], as_json: bool, keep: str | None, **given: Any) -> int:
    """Find out whether a training script resumes exactly.

    Runs COMMAND twice to its end, then again with kills at random instants and one after its last
    checkpoint. Says "resumes exactly" if state and losses are the same at each step, or names the
    first thing that differs and the likely cause. The script needs no change; its own checkpoint
    directory is not touched. Exit status: 0 it resumes exactly; 1 it does not, or it is not
    deterministic; 2 it fails by itself, or cannot be tested.
    """
    if not command_line:
        raise click.UsageError(
            "expected a command after --, for instance: checkfreq crashtest -- python train.py",
            click.get_current_context(),
        )
    from checkfreq.crashtest.trial import Settings
    from checkfreq.crashtest.work import tested

    settings = Settings(
        command=command_line,
        ranks=given["ranks"],
        kills=given["kills"],
        seed=given["seed"],
        signal=given["number"],
        is_group=given["group"],
        folder=given["folder"] or "",
        pattern=given["pattern"] or "",
        timeout_s=given["timeout_s"],
        jobs=given["jobs"],
    )
    if not settings.pattern and (settings.folder or settings.has_placeholder):
        raise ConfigError("expected --glob PATTERN too: the names of the checkpoints, like '*.pt'")
    signal.signal(signal.SIGTERM, _stop)
    verdict = tested(settings, keep=keep, say=_say)
    if as_json:
        print(text.json_of(verdict.json()))
    else:
        print("\n".join(printable(line) for line in verdict.lines()))
    return verdict.status


def _stop(number: int, frame: object) -> None:
    """End as after Ctrl-C: what was started is ended too."""
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(f"crashtest: {printable(line)}", file=sys.stderr, flush=True)
