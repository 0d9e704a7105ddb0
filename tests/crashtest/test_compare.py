"""Lives against whole runs, on records made by hand: what differs first, and the likely cause."""

from __future__ import annotations

from typing import Any

from checkfreq.crashtest.causes import (
    Evidence,
    likely_causes,
)
from checkfreq.crashtest.compare import What, first_difference
from checkfreq.crashtest.history import Line, Record
from checkfreq.crashtest.verdict import Death, Outcome, Verdict

PLAIN: dict[str, Any] = {"batches": (["train", [1, 2], "d"],), "losses": ("0.5",)}


def line(step: int, kind: str = "step", **fields: Any) -> Line:
    state = {"model.weight": f"float32[2, 2] {step:016x}", "rng.torch": f"r{step}"}
    state |= fields.pop("state", {})
    return Line(kind=kind, step=step, changed=state, **{**PLAIN, **fields})


def record(first: int, last: int, **at: Line) -> Record:
    lines = [at.get("begin") or line(first, "begin")]
    lines += [at.get(f"step{step}") or line(step) for step in range(first + 1, last + 1)]
    return Record(lines, has_manager=True)


def test_a_life_that_is_a_piece_of_the_whole_run_does_not_differ() -> None:
    whole = {0: record(0, 9)}
    assert first_difference(whole, {0: record(4, 7)}, is_over=False) is None


def test_the_first_step_that_differs_is_found_on_the_rank_where_it_comes_first() -> None:
    whole = {0: record(0, 9), 1: record(0, 9)}
    lived = {
        0: record(4, 9, step8=line(8, losses=("0.7",))),
        1: record(4, 9, step6=line(6, state={"model.weight": "float32[2, 2] other"})),
    }
    found = first_difference(whole, lived, is_over=False)
    assert found is not None
    assert (found.rank, found.restored, found.step, found.failed_at) == (1, 4, 6, 6)
    assert (found.first.what, found.first.name) == (What.TENSOR, "model.weight")


def test_losses_are_compared_where_the_state_is_not_read() -> None:
    whole = record(0, 9, step6=Line(kind="passed", step=6, **PLAIN))
    assert first_difference({0: whole}, {0: record(4, 9)}, is_over=False) is None
    lived = record(4, 9, step6=line(6, losses=("0.7",)))
    found = first_difference({0: whole}, {0: lived}, is_over=False)
    assert found is not None
    assert (found.step, found.first.what) == (6, What.LOSS)


def test_only_where_nothing_else_differs_a_kernel_may_have() -> None:
    whole = record(0, 9)
    lived = record(4, 9, step5=line(5, losses=("0.7",)))
    found = first_difference({0: whole}, {0: lived}, is_over=False)
    assert found is not None
    assert likely_causes(Evidence(found, whole))[0].name == "computed-otherwise"


def test_a_whole_run_may_not_end_at_another_step() -> None:
    lived = record(4, 8)
    lived.lines.append(line(8, "end"))
    found = first_difference({0: record(0, 9)}, {0: lived}, is_over=True)
    assert found is not None
    assert found.first.what is What.LENGTH


def test_a_verdict_as_json_names_the_difference_and_the_cause() -> None:
    other = line(5, batches=(["train", [7, 8], "e"],), losses=("0.7",))
    whole = record(0, 9)
    found = first_difference({0: whole}, {0: record(4, 9, step5=other)}, is_over=False)
    shown: dict[str, Any] = Verdict(
        outcome=Outcome.DIFFERS,
        num_steps=9,
        ranks=1,
        seed=3,
        deaths=(Death(6, "SIGKILL to the script", 4),),
        difference=found,
        causes=tuple(likely_causes(Evidence(found, whole))),
        seconds=12.34,
    ).json()
    assert [cause["name"] for cause in shown["causes"]] == ["other-order"]
    assert (shown["outcome"], shown["seconds"], shown["notes"]) == ("differs", 12.3, [])
    death = {"step": 6, "how": "SIGKILL to the script", "restored_step": 4}
    assert shown["kills"] == [death]
    difference = shown["difference"]
    assert (difference["restored_step"], difference["step"]) == (4, 5)
    items = {item["what"]: (item["expected"], item["found"]) for item in difference["items"]}
    assert items == {"sample": ("[1, 2]", "[7, 8]"), "loss": ("0.5", "0.7")}
