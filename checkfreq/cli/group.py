"""``checkfreq``: the command that the verbs belong to, and what becomes of errors.

Exit status: what the verb returns; 0 when all is well; 1 when there is no checkpoint, or a damaged
one; 2 when the command is wrong or the directory cannot be read; 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import click

import checkfreq
from checkfreq.cli.verbs import COMPLETE_VARIABLE, VERBS, Group
from checkfreq.errors import (
    CheckFreqError,
    CorruptCheckpointError,
    NoCheckpointError,
    printable,
)

BAD_CHECKPOINT, BAD_COMMAND, INTERRUPTED = 1, 2, 130


class Verbs(click.Group):
    """Lists the verbs without importing them, and imports the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return [*VERBS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a verb; None if there is none of that name."""
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        command: click.Command = importlib.import_module(verb.module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The verb that the first argument names; an error that lists them if it names none."""
        if (
            args
            and args[0] not in VERBS
            and not args[0].startswith("-")
            and not ctx.resilient_parsing
        ):
            meant = get_close_matches(args[0], VERBS, n=1)
            hint = f": did you mean {meant[0]}?" if meant else ""
            expected = f"expected one of {', '.join(VERBS)}"
            raise click.UsageError(f"{expected}; got {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs and their purposes under their headings."""
        for group in Group:
            rows = [(name, verb.purpose) for name, verb in VERBS.items() if verb.group is group]
            if rows:
                with formatter.section(group.value):
                    formatter.write_dl(rows)

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The verbs, or the options before them, that begin with ``incomplete``."""
        found = [
            click.shell_completion.CompletionItem(name, help=verb.purpose)
            for name, verb in VERBS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


@click.group(
    cls=Verbs,
    no_args_is_help=False,
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\ncheckfreq VERB --help explains a verb, with an example.\n\n"
    "Exit status: 0 success; 1 no checkpoint, or a damaged one; 2 wrong usage, or the directory "
    "cannot be read.",
)
@click.version_option(checkfreq.__version__, message="checkfreq %(version)s")
def command() -> None:
    """Look at checkpoints, check them, convert them, and run, plan and try trainings.

    DIR is the chk_dir of a CFManager. Where a verb only reads, the URL of a mirror will do too
    (s3://bucket/run).
    """


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status. Wrong usage, as in argparse, is SystemExit(2)."""
    _open_closed_streams()
    if COMPLETE_VARIABLE in os.environ:
        from checkfreq.cli import completion

        return completion.answer(command, os.environ[COMPLETE_VARIABLE])
    try:
        status = _invoke(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_went_away()
    except click.UsageError as error:
        _say_usage(error)
        raise SystemExit(BAD_COMMAND) from None
    except click.ClickException as error:
        return _fail(error.format_message(), BAD_COMMAND)
    except (CorruptCheckpointError, NoCheckpointError) as error:
        return _fail(str(error), BAD_CHECKPOINT)
    except (CheckFreqError, OSError) as error:
        return _fail(str(error), BAD_COMMAND)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    return status


def _invoke(argv: Sequence[str]) -> int:
    # Not Command.main(): it ends the process by itself, with 1 where a reader went away.
    try:
        with command.make_context("checkfreq", [*argv]) as context:
            status: int | None = command.invoke(context)
            return status or 0
    except click.exceptions.Exit as exit_:
        return exit_.exit_code


def _say_usage(error: click.UsageError) -> None:
    message = error.format_message()
    if error.ctx is not None:
        print(error.ctx.get_usage(), file=sys.stderr)
        message += f" (see {error.ctx.command_path} --help)"
    _fail(message, BAD_COMMAND)


def _fail(message: str, status: int) -> int:
    print(f"checkfreq: {printable(message, keep=chr(10))}", file=sys.stderr)
    return status


def _open_closed_streams() -> None:
    """``checkfreq report DIR >&-`` writes its page all the same, and what it prints to nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _reader_went_away() -> int:
    """``checkfreq show DIR | head`` is not an error; a flush at exit must not raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
