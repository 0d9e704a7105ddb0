"""Lives against whole runs, on records made by hand: what differs first, and the likely cause."""

from __future__ import annotations

from typing import Any

import pytest

from checkfreq.crashtest.causes import Evidence, likely_causes
from checkfreq.crashtest.compare import What, first_difference
from checkfreq.crashtest.history import Line, Record
from checkfreq.crashtest.verdict import Death, Outcome, Verdict

PLAIN: dict[str, Any] = {"batches": (["train", [1, 2], "d"],), "losses": ("0.5",)}


def line(step: int, kind: str = "step", **fields: Any) -> Line:
    state = {"model.weight": f"float32[2, 2] {step:016x}", "rng.torch": f"r{step}"}
    state |= fields.pop("state", {})
    return Line(kind=kind, step=step, digest=repr(state), changed=state, **{**PLAIN, **fields})


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
        1: record(4, 9, step6=line(6, state={"rng.torch": "other"})),
    }
    found = first_difference(whole, lived, is_over=False)
    assert found is not None
    assert (found.rank, found.restored, found.step) == (1, 4, 6)
    assert (found.first.what, found.first.name) == (What.GENERATOR, "rng.torch")


def test_samples_are_named_before_what_follows_from_them() -> None:
    other = line(5, batches=(["train", [7, 8], "e"],), losses=("9.0",), state={"rng.torch": "x"})
    found = first_difference({0: record(0, 9)}, {0: record(4, 9, step5=other)}, is_over=False)
    assert found is not None
    assert [item.what for item in found.items] == [What.SAMPLES, What.LOSS, What.GENERATOR]


def test_names_that_are_left_out_do_not_differ() -> None:
    other = line(5, state={"rng.torch": "x"})
    lived = {0: record(4, 9, step5=other)}
    ignoring = frozenset({"rng.torch"})
    assert first_difference({0: record(0, 9)}, lived, is_over=False, ignoring=ignoring) is None


def test_a_whole_run_may_not_end_at_another_step() -> None:
    lived = record(4, 8)
    lived.lines.append(line(8, "end"))
    found = first_difference({0: record(0, 9)}, {0: lived}, is_over=True)
    assert found is not None
    assert found.first.what is What.LENGTH


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("torch.optim.lr_scheduler.StepLR torch.optim.lr_scheduler.LRScheduler", "scheduler"),
        ("torch.amp.grad_scaler.GradScaler", "scaler"),
        ("torch.optim.swa_utils.AveragedModel torch.nn.modules.module.Module", "ema"),
        ("torch.optim.sgd.SGD torch.optim.optimizer.Optimizer", "optimizer"),
        ("train.Meter", "object"),
    ],
)
def test_an_object_that_was_not_restored_is_named_with_its_kind(kind: str, cause: str) -> None:
    lines = {f"step{n}": line(n, state={"thing.state": str(n)}) for n in range(1, 10)}
    whole = record(0, 9, begin=line(0, "begin", state={"thing.state": "0"}), **lines)
    begin = line(4, "begin", state={"thing.state": "0"}, untracked={"thing": kind})
    lived = record(4, 5, begin=begin, step5=line(5, state={"thing.state": "1"}))
    found = first_difference({0: whole}, {0: lived}, is_over=False)
    causes = likely_causes(Evidence(found, whole))
    assert len(causes) == 1
    assert causes[0].name.endswith(cause)
    assert "`thing`" in causes[0].text


def test_a_script_that_cannot_read_a_torn_checkpoint_saves_in_place() -> None:
    failed = Evidence(None, failed="Traceback\nEOFError: Ran out of input", was_torn=True)
    assert [cause.name for cause in likely_causes(failed)] == ["non-durable-save"]


def test_a_verdict_as_json_names_the_difference_and_the_cause() -> None:
    other = line(5, batches=(["train", [7, 8], "e"],))
    whole = record(0, 9)
    found = first_difference({0: whole}, {0: record(4, 9, step5=other)}, is_over=False)
    verdict = Verdict(
        outcome=Outcome.DIFFERS,
        num_steps=9,
        ranks=1,
        seed=3,
        deaths=(Death(6, "SIGKILL to the script", 4),),
        difference=found,
        causes=tuple(likely_causes(Evidence(found, whole))),
        seconds=12.34,
    )
    shown = verdict.json()
    causes = shown.pop("causes")
    assert isinstance(causes, list)
    assert [cause["name"] for cause in causes] == ["other-order"]
    assert shown == {
        "outcome": "differs",
        "num_steps": 9,
        "ranks": 1,
        "seed": 3,
        "kills": [{"step": 6, "how": "SIGKILL to the script", "restored_step": 4}],
        "difference": {
            "rank": 0,
            "restored_step": 4,
            "step": 5,
            "items": [
                {
                    "what": "sample",
                    "name": "order of 'train'",
                    "expected": "[1, 2]",
                    "found": "[7, 8]",
                }
            ],
        },
        "notes": [],
        "seconds": 12.3,
    }


def test_an_order_that_starts_again_is_told_from_a_place_that_is_off() -> None:
    def served(step: int, number: int) -> Line:
        starts = (["own", "train.py:1", []],) if step in (1, 5) else ()
        return line(step, batches=(), fetched=(["own", None, f"b{number}"],), starts=starts)

    whole = record(0, 8, **{f"step{n}": served(n, n) for n in range(1, 9)})
    for number, cause in ((3, "reused-seed"), (5, "position"), (99, "other-order")):
        lived = record(6, 7, step7=served(7, number))
        found = first_difference({0: whole}, {0: lived}, is_over=False)
        assert [one.name for one in likely_causes(Evidence(found, whole))] == [cause]
