"""``checkfreq plan``: what an interval costs, what a failure loses, and what would change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import DIRECTORY, SIZE, example, json_option
from checkfreq.cli.plan_source import Found, found_in, profile_of
from checkfreq.cli.plan_tables import NOW, Document, Row
from checkfreq.cli.run_options import (
    GPUS,
    max_overhead_option,
    numbers,
    rate_of,
    rate_option,
    seconds,
)
from checkfreq.errors import ConfigError
from checkfreq.simulation.planning import Bounds, Checkpoint, Failing, outlook
from checkfreq.simulation.prices import Prices, bill
from checkfreq.types import Objective

if TYPE_CHECKING:
    from checkfreq.store.store import CheckpointStore

_SIZES = (8, 64, 512, 4096, 32768)

F = TypeVar("F", bound=Callable[..., Any])


_FACTORS = numbers(float, "2,10")


def _price(name: str, default: float, purpose: str) -> Callable[[F], F]:
    return click.option(
        f"--price-{name}",
        type=float,
        metavar="P",
        default=default,
        show_default=True,
        help=purpose,
    )


@click.command(
    "plan",
    epilog=example(
        "checkfreq plan chk/ --restart-s 90 --gpus 8,1024 --plot plan.svg",
        "checkfreq plan --iteration-s 0.5 --cost-s 0.05 --persist-s 10 --state-bytes 20GiB "
        "--storage-factor 4",
    ),
)
@click.argument("store", metavar="[DIR]", type=DIRECTORY, required=False)
@seconds("--iteration-s", "Seconds per iteration.", metavar="T")
@seconds("--cost-s", "Seconds that a checkpoint adds to training.")
@seconds("--stall-s", "Of these, seconds for which training is held; the rest is slowdown.")
@seconds("--copy-s", "Seconds that the copy of the state takes.")
@seconds("--persist-s", "Seconds until it is durable, after the copy.")
@click.option("--state-bytes", type=SIZE, metavar="SIZE", help="Bytes of a checkpoint, all ranks.")
@click.option("--ranks", type=int, metavar="N", help="GPUs that the run has now (default: 1).")
@seconds(
    "--restart-s",
    "Seconds from a failure until training continues.",
    default=120.0,
    show_default=True,
)
@max_overhead_option
@click.option("--goodput", "is_for_goodput", is_flag=True, help="Plan as Objective.GOODPUT does.")
@rate_option("Cluster whose published failure rate is used (default: research).")
@seconds("--mtbf-s", "Seconds between failures of --ranks GPUs, instead of --rate.")
@click.option(
    "--gpus",
    type=GPUS,
    default=",".join(map(str, _SIZES)),
    show_default=True,
    metavar="N[,N...]",
    help="Sizes of cluster to plan for.",
)
@click.option(
    "--storage-factor",
    type=_FACTORS,
    default="2",
    show_default=True,
    metavar="F[,F...]",
    help="What if storage wrote F times as fast.",
)
@click.option(
    "--ranks-factor",
    type=_FACTORS,
    default="2",
    show_default=True,
    metavar="F[,F...]",
    help="What if F times as many ranks shared the state.",
)
@click.option(
    "--storage",
    type=click.Choice(["shared", "own"]),
    default="shared",
    show_default=True,
    help="Whether ranks share their storage, or each node has its own.",
)
@click.option(
    "--keep",
    "num_kept",
    type=int,
    default=28,
    show_default=True,
    metavar="N",
    help="Checkpoints kept on S3; 28 is the most of the default retention's first day.",
)
@seconds(
    "--upload-every-s",
    "Least seconds between two uploads (default: every checkpoint).",
    default=0.0,
)
@_price("gb-month", 0.023, "A GB on S3 for a month.")
@_price("1000-writes", 0.005, "A thousand PUT requests.")
@_price("1000-reads", 0.0004, "A thousand GET requests.")
@_price("gb-out", 0.0, "A GB that leaves S3, read by restores; 0 within a region.")
@click.option("--plot", metavar="FILE", help="Draw it too, as .png or .svg (needs matplotlib).")
@json_option
def command(store: CheckpointStore | None, as_json: bool, plot: str | None, **given: Any) -> int:
    """Plan checkpoints: interval, overhead, loss, bytes, cost on S3, and goodput by size.

    From the costs that a run measured and left in DIR (profile.json, events.jsonl), or from
    numbers; a number that is given replaces the one in DIR. The prices are S3 Standard's in
    us-east-1 (2025, in dollars): give yours.
    """
    if plot is not None and not plot.endswith((".png", ".svg")):
        raise ConfigError(f"--plot: expected a name that ends in .png or .svg, got {plot}")
    document = _planned(store, _Given(**given))
    if plot is not None:
        from checkfreq.cli.plan_plot import draw

        draw(document, plot)
    if as_json:
        print(text.json_of(document.to_json()))
        return 0
    print("\n".join(document.lines()))
    return 0


@dataclass(frozen=True, slots=True)
class _Given:
    """The options."""

    iteration_s: float | None
    cost_s: float | None
    stall_s: float | None
    copy_s: float | None
    persist_s: float | None
    state_bytes: int | None
    ranks: int | None
    restart_s: float
    max_overhead: float
    is_for_goodput: bool
    rate: str | None
    mtbf_s: float | None
    gpus: list[int]
    storage_factor: list[float]
    ranks_factor: list[float]
    storage: str
    num_kept: int
    upload_every_s: float
    price_gb_month: float
    price_1000_writes: float
    price_1000_reads: float
    price_gb_out: float


def _planned(store: CheckpointStore | None, given: _Given) -> Document:
    found = Found() if store is None else found_in(store)
    named = {
        "iteration_s": given.iteration_s,
        "cost_s": given.cost_s,
        "host_copy_s": given.copy_s,
        "persist_s": given.persist_s,
    }
    profile = profile_of(found, named)
    bounds = Bounds(
        max_overhead=given.max_overhead,
        restart_s=given.restart_s,
        objective=Objective.GOODPUT if given.is_for_goodput else Objective.BOUND,
    )
    checkpoint = Checkpoint(
        profile=profile,
        num_bytes=(found.num_bytes or 0) if given.state_bytes is None else given.state_bytes,
        written_bytes=_written_bytes(found, given.state_bytes),
        stall_s=found.stall_s if given.stall_s is None else given.stall_s,
    )
    failing = Failing(
        num_gpus=(found.world or 1) if given.ranks is None else given.ranks,
        rate=rate_of(given.rate, mtbf_s=given.mtbf_s),
        mtbf_s=given.mtbf_s,
    )
    prices = Prices(
        gb_month=given.price_gb_month,
        thousand_writes=given.price_1000_writes,
        thousand_reads=given.price_1000_reads,
        gb_out=given.price_gb_out,
    )
    return _document(given, found, checkpoint, bounds, failing, prices)


def _written_bytes(found: Found, given: int | None) -> int:
    """Bytes of a checkpoint that are written: all, but for what was linked in DIR."""
    if given is not None:
        return given
    return (found.num_bytes or 0) if found.written_bytes is None else found.written_bytes


def _document(
    given: _Given,
    found: Found,
    checkpoint: Checkpoint,
    bounds: Bounds,
    failing: Failing,
    prices: Prices,
) -> Document:
    def row(name: str, of: Checkpoint, num_gpus: int) -> Row:
        knows = given.is_for_goodput or given.mtbf_s is not None
        plan = outlook(of, bounds, failing, num_gpus=num_gpus, knows_mtbf=knows)
        month = bill(of, plan, prices, num_kept=given.num_kept, every_s=given.upload_every_s)
        return Row(name, of, plan, month)

    faster = {
        f"storage x{factor:g}": checkpoint.with_storage(factor) for factor in given.storage_factor
    }
    drawn = {NOW: checkpoint, **faster}
    cases = [row(name, of, failing.num_gpus) for name, of in drawn.items()]
    for factor in given.ranks_factor:
        wider = checkpoint.with_ranks(factor, is_storage_shared=given.storage == "shared")
        size = max(1, round(factor * failing.num_gpus))
        cases.append(row(f"ranks x{factor:g}", wider, size))
    sizes = sorted(set(given.gpus))
    clusters = {
        name: [outlook(of, bounds, failing, num_gpus=size) for size in sizes]
        for name, of in drawn.items()
    }
    options = [name for name in ("iteration_s", "cost_s", "copy_s", "persist_s", "state_bytes")
               if getattr(given, name) is not None]  # fmt: skip
    sources = [*found.sources, *(["options"] if options else [])]
    return Document(sources, checkpoint, bounds, failing, prices, found.failures, cases, clusters)
