"""Lives against whole runs, on records made by hand: what differs first, and the likely cause."""

from __future__ import annotations

from typing import Any

import pytest

from checkfreq.crashtest.causes import (
    Evidence,
    likely_causes,
    why_not_deterministic,
    why_not_resumed,
)
from checkfreq.crashtest.compare import Difference, What, first_difference, noise
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


def causes_of(whole: Record, lived: Record, *, is_over: bool = False) -> tuple[Difference, str]:
    """The difference, and the name and the text of its first cause."""
    found = first_difference({0: whole}, {0: lived}, is_over=is_over)
    assert found is not None
    first = likely_causes(Evidence(found, whole))[0]
    return found, f"{first.name}: {first.text}"


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


def test_what_came_first_is_the_difference_where_harm_follows() -> None:
    lived = record(
        4, 9, step6=line(6, state={"rng.torch": "other"}), step7=line(7, losses=("0.7",))
    )
    found = first_difference({0: record(0, 9)}, {0: lived}, is_over=False)
    assert found is not None
    assert (found.step, found.failed_at, found.first.what) == (6, 7, What.GENERATOR)


def test_a_batch_that_was_only_looked_at_is_no_difference() -> None:
    batch, before = ["train", [1, 2], "d"], ["train", [3, 4], "e"]
    lived = record(4, 9, step6=line(6, batches=(before, batch)))
    assert first_difference({0: record(0, 9)}, {0: lived}, is_over=False) is None


def test_losses_are_compared_where_the_state_is_not_read() -> None:
    whole = record(0, 9, step6=Line(kind="passed", step=6, **PLAIN))
    assert first_difference({0: whole}, {0: record(4, 9)}, is_over=False) is None
    lived = record(4, 9, step6=line(6, losses=("0.7",)))
    found = first_difference({0: whole}, {0: lived}, is_over=False)
    assert found is not None
    assert (found.step, found.first.what) == (6, What.LOSS)


def test_names_that_differ_in_uninterrupted_runs_are_no_causes() -> None:
    def named(time: str, count: int, **fields: Any) -> Line:
        state = {"variable name": time, "variable count": str(count)}
        return line(5, state=state, **fields)

    whole, again = record(0, 9, step5=named("run-1", 5)), record(0, 9, step5=named("run-2", 5))
    names = noise({0: whole}, {0: again})
    assert names == {"variable name"}
    lived = record(4, 9, step5=named("run-3", 1, losses=("0.7",)))
    found = first_difference({0: whole}, {0: lived}, is_over=False, ignoring=names)
    assert found is not None
    assert found.variables == {"count": ("5", "1")}
    assert [item.what for item in found.items] == [What.LOSS]


def test_a_variable_that_is_restored_before_training_goes_on_is_no_cause() -> None:
    def counted(step: int, kind: str, number: int, seen: str = "a") -> Line:
        state = {"variable step": str(number), "variable seen": f"float32[2] {seen}"}
        return line(step, kind, state=state, losses=("0.7",) if seen == "b" else ("0.5",))

    whole = record(0, 9, step5=counted(5, "step", 4))
    begin = line(4, "begin")
    lived = record(4, 9, begin=begin, step5=counted(5, "step", 4, "b"))
    _, cause = causes_of(whole, lived)
    assert cause.startswith("untracked-variable: ")
    assert cause.endswith("uninterrupted run: `seen`.")


def test_a_run_that_goes_on_is_longer_and_names_what_counts() -> None:
    whole = record(0, 9, step9=line(9, state={"variable epoch": "2"}))
    lived = record(8, 10, step9=line(9, state={"variable epoch": "0"}))
    found, cause = causes_of(whole, lived)
    assert (found.failed_at, found.first.what) == (10, What.LENGTH)
    assert cause.startswith("longer-run: The resumed run goes on beyond the 9 steps")
    assert "`epoch` (0 instead of 2)" in cause


def test_only_where_nothing_else_differs_a_kernel_may_have() -> None:
    _, cause = causes_of(record(0, 9), record(4, 9, step5=line(5, losses=("0.7",))))
    assert cause.startswith("computed-otherwise: ")
    begin = line(4, "begin", state={"model.weight": "float32[2, 2] other"})
    _, cause = causes_of(record(0, 9), record(4, 9, begin=begin, step5=line(5, losses=("0.7",))))
    assert cause.endswith("these are not what they were: model.weight.")


def test_the_cause_of_runs_that_differ_names_what_differs() -> None:
    def begin(numpy: str) -> Line:
        return line(0, "begin", state={"rng.numpy": numpy})

    def causes(other: Line, *, is_by_hash: bool = False, draws: bool = False) -> list[str]:
        whole = record(0, 9, begin=begin("a"))
        if draws:
            whole = record(0, 9, begin=begin("a"), step5=line(5, state={"rng.numpy": "drawn"}))
        again = record(0, 9, begin=begin("b"), step5=other)
        ignoring = frozenset({"rng.numpy"})
        found = first_difference({0: whole}, {0: again}, is_over=True, ignoring=ignoring)
        assert found is not None
        causes = why_not_deterministic(Evidence(found, whole), is_by_hash=is_by_hash)
        return [f"{cause.name}: {cause.text}" for cause in causes]

    (by_hash,) = causes(line(5, losses=("0.7",)), is_by_hash=True)
    assert by_hash.startswith("hash-seed: Loss of the iteration differs with Python's hash seed")
    kernel, _ = causes(line(5, losses=("0.7",)))
    assert kernel.startswith("non-deterministic-kernel: Loss of the iteration differs although")
    setting = {"opt.param_groups.0.lr": "0.3"}
    (clock,) = causes(line(5, state=setting))
    assert clock.startswith("clock: Setting opt.param_groups.0.lr differs although")
    (unseeded,) = causes(line(5, losses=("0.7",)), draws=True)
    assert unseeded.endswith("these differed already: rng.numpy.")


def test_a_whole_run_may_not_end_at_another_step() -> None:
    lived = record(4, 8)
    lived.lines.append(line(8, "end"))
    found = first_difference({0: record(0, 9)}, {0: lived}, is_over=True)
    assert found is not None
    assert found.first.what is What.LENGTH


@pytest.mark.parametrize(
    "kind",
    [
        "torch.optim.lr_scheduler.StepLR torch.optim.lr_scheduler.LRScheduler",
        "torch.amp.grad_scaler.GradScaler",
        "torch.optim.swa_utils.AveragedModel torch.nn.modules.module.Module",
        "train.Meter",
    ],
)
def test_an_object_that_was_not_restored_is_named_with_its_kind(kind: str) -> None:
    lines = {f"step{n}": line(n, state={"thing.state": str(n)}) for n in range(1, 10)}
    whole = record(0, 9, begin=line(0, "begin", state={"thing.state": "0"}), **lines)
    begin = line(4, "begin", state={"thing.state": "0"}, untracked={"thing": kind})
    lived = record(4, 5, begin=begin, step5=line(5, state={"thing.state": "1"}))
    _, cause = causes_of(whole, lived)
    title = kind.split()[0].rpartition(".")[2]
    assert cause.startswith(f"untracked-object: `thing` ({title}) is in no checkpoint")


def test_why_a_script_fails_when_it_is_started_again() -> None:
    said = "Traceback\nEOFError: Ran out of input"
    torn = why_not_resumed(said, was_torn=True, was_over=False)
    assert torn.name == "non-durable-save"
    done = why_not_resumed("NameError: loss", was_torn=False, was_over=True)
    assert (done.name, done.text.endswith("fails: NameError: loss")) == ("fails-when-done", True)
    assert why_not_resumed("", was_torn=False, was_over=False).text.endswith("no output")


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


def test_an_order_that_starts_again_is_told_from_a_place_that_is_off() -> None:
    def served(step: int, number: int) -> Line:
        starts = (["own", "train.py:1", []],) if step in (1, 5) else ()
        return line(step, batches=(), fetched=(["own", None, f"b{number}"],), starts=starts)

    whole = record(0, 8, **{f"step{n}": served(n, n) for n in range(1, 9)})
    for number, cause in ((3, "reused-seed"), (5, "position"), (99, "other-order")):
        lived = record(6, 7, step7=served(7, number))
        found = first_difference({0: whole}, {0: lived}, is_over=False)
        assert [one.name for one in likely_causes(Evidence(found, whole))] == [cause]
