"""Mirrors in four states, six ends, three ways to come back: each ends as the pages promise."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict

import pytest

from benchmarks.lab.record import environment
from benchmarks.lab.results import RESULTS
from tests.notices.conftest import serving
from tests.required import require
from tests.s3.server import running
from tests.slurm.cluster import started, why_not
from tests.slurm.endings import CELLS, GRACE_S, Cell, Ending, Place, covers_pairs

pytestmark = [pytest.mark.slurm, pytest.mark.s3, pytest.mark.more, pytest.mark.slow]

#: "all", "record" for all that are written down too, or nothing for those that cover all pairs.
WANTED = os.environ.get("CHECKFREQ_ENDINGS", "")
RECORDED = WANTED == "record"
#: Ending a Python with torch takes half a second of a core, and all cells share a few of them:
#: SLURM leaves more time than it says, and what each run needed is compared here.
LATE_S = 10.0
NUM_NODES = 6
PLAYED = [cell for cell in CELLS if covers_pairs(cell) or WANTED]


@pytest.fixture(scope="module")
def endings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Cell, Future[Ending]]]:
    """All that were asked for, as many at once as there are nodes."""
    if reason := why_not():
        require("slurm", reason)
    folder = tmp_path_factory.mktemp("endings")
    nodes: queue.Queue[str] = queue.Queue()
    for number in range(1, NUM_NODES + 1):
        nodes.put(f"n{number}")

    def play(place: Place, cell: Cell) -> Ending:
        node = nodes.get()
        try:
            return place.play(cell, node)
        finally:
            nodes.put(node)

    with (
        running(folder) as s3,
        serving() as metadata,
        started(folder / "slurm", num_nodes=NUM_NODES, grace_s=GRACE_S + 5, over_min=1) as cluster,
        ThreadPoolExecutor(NUM_NODES) as pool,
    ):
        place = Place(cluster, s3, metadata, folder)
        ids = {item.name for item in request.session.items}
        asked = [cell for cell in PLAYED if any(f"[{cell}]" in name for name in ids)]
        found = {cell: pool.submit(play, place, cell) for cell in asked}
        yield found
    if RECORDED:
        how = {
            **environment(),
            "command": "CHECKFREQ_ENDINGS=record pytest tests/slurm/test_endings.py",
        }
        with (RESULTS / "endings.jsonl").open("a") as out:
            for cell, each in found.items():
                if each.exception() is not None:
                    continue
                line = {"benchmark": "endings", **asdict(cell), **each.result().line(), **how}
                out.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("cell", PLAYED, ids=str)
def test_it_ends_by_itself_with_all_it_trained_and_comes_back(
    endings: dict[Cell, Future[Ending]], cell: Cell
) -> None:
    found = endings[cell].result()
    assert found.status == 75, found.log
    assert found.left_s > -LATE_S, found.log
    assert found.durable == found.stopped_at, found.log
    assert (found.state, found.num_restarts) == (
        ("CANCELLED", 0) if cell.is_for_good else ("COMPLETED", 1)
    ), found.log
    if cell.mirror == "healthy" and cell.way != "requeue":  # which does not wait for an upload
        assert found.mirrored == found.stopped_at, found.log
    if not cell.is_for_good:
        assert found.mirrored_last == found.trained, found.log
