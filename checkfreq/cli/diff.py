"""``checkfreq diff``: which tensors and values of two checkpoints differ, and by how much.

``checkfreq.cli.comparing`` compares, and needs NumPy; it is imported when two are named.
"""

from __future__ import annotations

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import example, json_option
from checkfreq.cli.places import two_places
from checkfreq.errors import CorruptCheckpointError, NoCheckpointError

_LINES = 20


@click.command(
    "diff",
    epilog=example(
        "checkfreq diff chk/ 1100 1200",
        "checkfreq diff chk/ other/ 1200 --only model --histogram",
        "checkfreq diff chk/step-00001100 chk/step-00001200",
        "checkfreq diff chk/ s3://bucket/run 1200",
    ),
)
@click.argument("words", metavar="A [B] [STEP [STEP]]", nargs=-1, required=True)
@click.option("--only", multiple=True, metavar="NAME", help="Compare this object; repeatable.")
@click.option("--histogram", is_flag=True, help="Also count differences by powers of ten.")
@click.option("--all", "is_all", is_flag=True, help=f"Print more than {_LINES} lines of a kind.")
@json_option
def command(
    words: tuple[str, ...], only: tuple[str, ...], histogram: bool, is_all: bool, as_json: bool
) -> int:
    """Show which tensors and values of two checkpoints differ, and by how much.

    A and B are directories or URLs of mirrors, or one of them, A, with two steps. Without steps,
    these are the newest of A and B, or the newest two of A. Elements are compared by their bits;
    MAX REL is the difference divided by the larger of the two magnitudes. Objects that are not
    tensors are compared too. Exit status, as that of diff: 0 equal, 1 different, 2 trouble.
    """
    try:
        a, b = two_places(words)
        from checkfreq.cli.comparing import compare

        found = compare(a, b, only=only)
    except (CorruptCheckpointError, NoCheckpointError) as error:  # 1 means: different
        raise click.ClickException(str(error)) from None
    if as_json:
        print(text.json_of(found.to_json(histogram=histogram)))
    else:
        for line in found.lines(most=None if is_all else _LINES, histogram=histogram):
            print(line)
    return 1 if found.differs else 0
