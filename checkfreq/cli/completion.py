"""``checkfreq completion``: the script that makes a shell complete verbs, options and steps.

The script calls ``checkfreq`` again for each completion, with `COMPLETE_VARIABLE` set.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from checkfreq.cli.arguments import example, json_option
from checkfreq.cli.text import json_of
from checkfreq.cli.verbs import COMPLETE_VARIABLE

_SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    epilog=example(
        "checkfreq completion bash > ~/.local/share/bash-completion/completions/checkfreq",
        "checkfreq completion zsh > ~/.zfunc/_checkfreq",
        "checkfreq completion fish > ~/.config/fish/completions/checkfreq.fish",
    ),
)
@click.argument("shell", type=click.Choice(_SHELLS))
@json_option
def command(shell: str, as_json: bool) -> int:
    """Print the script that makes a shell complete verbs, options, directories and steps."""
    kind = get_completion_class(shell)
    assert kind is not None, "click has the shells of the choice"
    # The command is not asked for anything here: what it completes is answered by `answer`.
    source = kind(click.Command("checkfreq"), {}, "checkfreq", COMPLETE_VARIABLE).source()
    print(json_of({"shell": shell, "script": source}, indent=None) if as_json else source)
    return 0


def answer(command: click.Command, instruction: str) -> int:
    """Print what a shell asked for: ``bash_complete``, say, with words in the environment."""
    shell, _, what = instruction.partition("_")
    kind = get_completion_class(shell)
    if kind is None or what != "complete":
        return 1
    print(kind(command, {}, "checkfreq", COMPLETE_VARIABLE).complete())
    return 0
