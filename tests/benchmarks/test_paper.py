"""The paper's models: what follows from their costs is exact, and each of them trains."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lab.derived import Stall, allowed_by_storage, recovery_s
from benchmarks.lab.estimate import Estimate
from benchmarks.lab.language import IGNORED, Language
from benchmarks.lab.overheads import Measured
from benchmarks.lab.paired import FrozenArm, Round, clean_window
from benchmarks.lab.training import Loop
from benchmarks.make_images import ImageSet, make
from benchmarks.paper import measure as paper
from benchmarks.paper import table as tables
from benchmarks.paper.arms import auto_arm, held_arm, judged
from benchmarks.paper.measure import arguments, chosen
from benchmarks.paper.recording import CheckpointCosts, RecordingArm, WindowRecord
from benchmarks.paper.trial import Chosen, Measurements, Trial, Windows, fingerprint, kept
from benchmarks.paper.workloads import Workload, on_cpu, on_gpu
from checkfreq.examples.imagenet.options import is_installed
from checkfreq.types import SnapshotPlace
from tests.benchmarks.test_benchmarks_run import lines_of

#: Runs what users have beside us: large frameworks (`make test-more`).

needs_torchvision = pytest.mark.skipif(
    not is_installed("torchvision"), reason="torchvision is not installed"
)
needs_transformers = pytest.mark.skipif(
    not is_installed("transformers"), reason="transformers is not installed"
)


class TestWhatFollowsFromTheCosts:
    def test_recovery_is_the_restore_half_an_interval_and_the_time_to_durable(self) -> None:
        assert recovery_s(restore_s=3.0, steps=10, iteration_s=0.5, durable_s=1.25) == 6.75

    def test_the_three_parts_of_a_stall_add_up_to_the_cost(self) -> None:
        stall = Stall.of(cost_s=1.0, held_s=0.75, wait_s=0.5)
        assert (stall.boundary_s, stall.wait_s, stall.rest_s) == (0.25, 0.5, 0.25)

    def test_a_slowdown_below_zero_is_not_hidden(self) -> None:
        assert Stall.of(cost_s=0.5, held_s=0.75, wait_s=0.0).rest_s == -0.25

    @pytest.mark.parametrize(("limit", "allowed"), [(0.3, 1), (1.5, 2), (20.0, 22.0)])
    def test_an_interval_may_exceed_the_storage_limit_by_a_tenth(
        self, limit: float, allowed: float
    ) -> None:
        assert allowed_by_storage(limit) == pytest.approx(allowed)

    def test_an_automatic_arm_has_its_parts_and_its_storage_limit(self) -> None:
        arm = auto_arm(measurements(), on_cpu()["resnet18"], bound=0.035)
        assert (arm["k"], arm["overhead"], arm["low"], arm["high"]) == (10, 0.025, 0.015, 0.035)
        assert (arm["cost_ms"], arm["cost_low_ms"], arm["cost_high_ms"]) == (125.0, 75.0, 175.0)
        assert (arm["boundary_ms"], arm["wait_ms"], arm["rest_ms"]) == (10.0, 20.0, 95.0)
        assert (arm["storage_limit"], arm["k_against_limit"]) == (4.0, 2.5)
        assert arm["recovery_s"] == 2.0 + 5 * 0.5 + 3.0
        assert arm["met"]

    def test_an_interval_that_deferrals_made_longer_meets_nothing(self) -> None:
        assert not auto_arm(measurements(taken=0.9), on_cpu()["resnet18"], bound=0.035)["met"]

    def test_an_interval_that_is_not_known_is_none_in_the_line(self) -> None:
        unknown = Estimate(0.025, math.inf, -math.inf, math.inf)
        arm = auto_arm(measurements(unknown), on_cpu()["resnet18"], bound=0.035)
        assert (arm["low"], arm["high"], arm["cost_high_ms"]) == (None, None, None)
        assert not arm["met"]

    def test_standing_still_costs_what_it_takes(self) -> None:
        arm = held_arm(measurements(), steps=10)
        assert (arm["overhead"], arm["held_ms"]) == (0.8, 4000.0)
        assert (arm["low"], arm["high"]) == (0.8, 0.8)
        assert arm["recovery_s"] == 2.0 + 5 * 0.5 + 4.0

    def test_a_longer_interval_costs_less_and_loses_more(self) -> None:
        arm = held_arm(measurements(), steps=1000)
        assert (arm["overhead"], arm["recovery_s"]) == (0.008, 2.0 + 500 * 0.5 + 4.0)

    def test_the_targets_of_the_gpu_are_judged_on_their_own(self) -> None:
        kept, gpu = Estimate(0.03, 0.0, 0.03, 0.03), on_gpu()
        other_size, elsewhere = {"image_size": 64}, {"device": "cpu"}
        for changed in (other_size, elsewhere, {"batch": 8}, {"amp": False}):
            assert judge(replace(gpu["resnet50"], **changed), 3, kept)[1]
        assert not judge(replace(gpu["resnet50"], device="cuda:1"), 3, kept)[1]
        assert judge(gpu["resnet50"], 2, kept)[1]
        assert not judge(gpu["resnet50"], 3, kept)[1]
        assert judge(gpu["resnet18"], 3, kept)[1]
        assert judge(gpu["gpt2-xl"], 22, kept)[1]
        assert not judge(gpu["gpt2-xl"], 23, kept)[1]
        assert not judge(gpu["gpt2-xl"], 22, kept, stall=0.01)[1]


def judge(
    workload: Workload, steps: int, found: Estimate, *, stall: float = 0.009
) -> tuple[str, bool]:
    return judged(workload, steps, found, bound=0.035, limit=20.0, stall_of_iteration=stall)


HOST = SnapshotPlace.HOST
FOUND = Estimate(0.025, 0.005, 0.015, 0.035)


def measurements(found: Estimate = FOUND, *, taken: float = 1.0) -> Measurements:
    """T is 0.5 s; a checkpoint is durable after 3 s, and its restore takes 2 s."""
    overhead = Measured(
        estimate=found,
        estimate_all=found,
        num_rounds=4,
        num_left_out=0,
        iteration_s=0.5,
        foreign=0.0,
        taken=taken,
        seconds=20.0,
    )
    windows = Windows(
        overhead=overhead,
        checkpoints=4,
        persist_s=2.5,
        durable_s=3.0,
        held_s=0.03,
        wait_s=0.02,
        still_s=[4.0, 4.0, 4.0],
    )
    return Measurements(
        chosen=Chosen(
            steps=10, reason="budget", predicted_overhead=0.03, durable_s=3.0, place=HOST
        ),
        windows=windows,
        restore_s=[1.0, 2.0, 5.0],
        raw_write_s=2.0,
        num_parameters=7,
        state_bytes=84,
        epoch_iterations=None,
    )


class TestWindows:
    @pytest.mark.parametrize(
        ("steps", "durable_s", "iterations"),
        [
            (10, 3.0, 10),  # durable after 6 iterations: whole intervals
            (100, 3.0, 12),  # over long before the next one
            (1, 0.1, 1),  # at least half a second: one iteration is that
        ],
    )
    def test_a_window_is_whole_intervals_or_twice_the_time_to_durable(
        self, steps: int, durable_s: float, iterations: int
    ) -> None:
        plan = Chosen(
            steps=steps, reason="", predicted_overhead=0.0, durable_s=durable_s, place=HOST
        )
        assert plan.window(iteration_s=0.5) == iterations

    def test_a_cut_window_has_one_checkpoint_that_is_for_the_whole_interval(
        self, tmp_path: Path
    ) -> None:
        arm = FrozenArm(Loop("transformer", batch=1), tmp_path, interval=50, length=3)
        arm.warm_up()
        window = arm.window()
        assert (arm.iterations, window.covered, arm.taken) == (3, 50, 1.0)
        assert window.iterations >= 3
        arm.close()

    def test_standing_still_ends_when_the_boundary_is_durable(self, tmp_path: Path) -> None:
        arm = FrozenArm(Loop("transformer", batch=1), tmp_path, interval=2, length=4)
        arm.warm_up()
        assert arm.stand_still() > 0
        assert arm.manager.latest_step() == arm.manager.global_step
        arm.close()


class TestTable:
    def test_it_says_how_much_faster_recovery_is_than_with_a_checkpoint_per_epoch(self) -> None:
        pairs = (("a", 4.0, 50.0), ("b", 1.0, 2500.0), ("c", 2.0, 9.0))
        lines = [
            each
            for model, ours, epoch in pairs
            for each in (
                table_line(model, "auto", ours),
                table_line(model, "epoch boundary", epoch),
            )
        ]
        text = tables.arms([*lines, table_line("d", "auto", 1.0)])
        assert "is 4.5 to 2,500 times as fast as with a checkpoint per epoch (median 12)" in text
        model = "b, cpu, 1 thread of 2 cores, 8 × 32 px"
        assert f"| {model} | 500 ms | auto | 1,200, budget | 2.50 % |" in text
        assert (
            f"| {model} | 500 ms | epoch boundary, ImageNet-1k | 1,200, budget | 2.50 % |" in text
        )

    def test_an_epoch_that_was_set_is_named_and_counted_apart(self) -> None:
        short = {**table_line("a", "epoch boundary", 40.0), "epoch": "1,000 iterations"}
        real = [table_line("b", "auto", 1.0), table_line("b", "epoch boundary", 5.0)]
        text = tables.arms([table_line("a", "auto", 4.0), short, *real])
        assert "10 to 10 times as fast as with a checkpoint per epoch, assuming an epoch" in text
        assert "5.0 to 5.0 times as fast as with a checkpoint per epoch (median 5.0)" in text
        assert "| epoch boundary, 1,000 iterations |" in text

    def test_overhead_of_all_rounds_stands_beside_that_of_the_undisturbed(self) -> None:
        line = {**table_line("a", "auto", 4.0), "overhead_all": 0.027}
        assert "| 2.50 % | 1.00 % to unknown | 2.70 % |" in tables.arms([line])

    def test_threads_of_cores_are_of_a_cpu(self) -> None:
        line = {**table_line("a", "auto", 4.0), "device": "cuda", "data": "images"}
        assert "| a, cuda, 8 × 32 px, images |" in tables.arms([line])

    def test_other_threads_are_another_training(self) -> None:
        lines = [table_line("a", "auto", 4.0), {**table_line("a", "auto", 2.0), "threads": 2}]
        assert tables.arms(lines).count("\n| a, cpu") == 2

    def test_a_failure_is_shown_until_it_is_measured(self) -> None:
        good = table_line("a", "auto", 4.0)
        failed = {**table_line("a", "failed", 0.0), "failed": "OutOfMemoryError"}
        del failed["iteration_ms"], failed["recovery_s"]
        assert tables.arms([failed]).count("| failed: OutOfMemoryError |") == 1
        assert tables.stalls([failed]) == ""
        assert "failed" not in tables.arms([failed, good])
        assert "failed" in tables.arms([good, failed])

    def test_there_is_no_such_sentence_without_a_pair(self) -> None:
        assert "times as fast" not in tables.arms([table_line("a", "auto", 4.0)])
        assert tables.arms([]) == tables.stalls([]) == ""


def table_line(model: str, arm: str, recovery_s: float) -> dict[str, object]:
    return {
        **{"model": model, "arm": arm, "device": "cpu", "batch": 8, "image_size": 32},
        **{"iteration_ms": 500.0, "k": 1200, "reason": "budget"},
        **{"overhead": 0.025, "low": 0.01, "high": None},
        **{"restore_s": 1.0, "durable_s": 1.0, "recovery_s": recovery_s},
        **({"epoch": "ImageNet-1k"} if arm == "epoch boundary" else {}),
        **{"data": "random", "threads": 1},
        **{"command": "c", "commit": "abc", "versions": {"torch": "2"}},
        "machine": {"cores": 2, "accelerator": None},
    }


class TestWorkloads:
    def test_the_papers_batches_and_epochs(self) -> None:
        sizes = {x.model: (x.batch, x.image_size, x.epoch_iterations) for x in on_gpu().values()}
        assert sizes["resnet50"] == sizes["vgg16"] == (256, 224, 5005)
        assert sizes["resnext101"] == sizes["densenet121"] == (128, 224, 10010)
        assert sizes["inception_v3"] == (256, 299, 5005)
        assert all(x.amp for x in on_gpu().values())

    def test_options_change_the_preset(self) -> None:
        args = arguments(["--preset", "gpu", "--device", "cuda:1", "--model", "vgg16", "--no-amp"])
        (workload,) = chosen(args, is_there=lambda _: True)
        assert workload == replace(on_gpu()["vgg16"], device="cuda:1", amp=False)

    def test_the_largest_is_trained_when_named_only(self) -> None:
        args = arguments(["--preset", "gpu"])
        names = [x.model for x in chosen(args, is_there=lambda _: True)]
        assert len(names) == 8
        assert "gpt2-xl" not in names

    def test_libraries_that_are_not_installed_are_skipped_with_a_sentence(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        args = arguments(["--preset", "cpu", "--model", "bert", "resnet18"])
        (workload,) = chosen(args, is_there=lambda name: name != "transformers")
        assert workload.model == "resnet18"
        assert capsys.readouterr().err == "bert: left out, transformers is not installed\n"

    def test_images_are_for_the_models_of_images(self, capsys: pytest.CaptureFixture[str]) -> None:
        args = arguments(["--preset", "cpu", "--data", "d", "--model", "gpt2", "gpt2-xl"])
        assert list(chosen(args, is_there=lambda _: True)) == []
        said = capsys.readouterr().err
        assert (
            said == "gpt2: left out, --data holds images\ngpt2-xl: left out, it is not for a CPU\n"
        )


@needs_torchvision
@needs_transformers
@pytest.mark.parametrize("model", on_cpu())
def test_every_model_trains_all_of_its_parameters(model: str) -> None:
    loop = replace(on_cpu()[model], batch=2).loop(seed=0)
    before = fingerprint(loop)
    loop.iterate()
    assert fingerprint(loop) != before
    assert all(each.grad is not None for each in loop.model.parameters())


@needs_torchvision
def test_mixed_precision_computes_in_bfloat16_and_keeps_the_weights_in_float32() -> None:
    loop = Loop("resnet18", batch=2, amp=True, device="cpu")
    seen: list[torch.dtype] = []
    loop.model.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    loop.iterate()
    loop.synchronize()
    assert seen == [torch.bfloat16]
    assert {each.dtype for each in loop.model.parameters()} == {torch.float32}


@needs_torchvision
def test_inception_has_its_auxiliary_head_where_it_fits() -> None:
    with torch.device("meta"):
        assert Loop("inception_v3", batch=2, image_size=299, device="meta").model.AuxLogits
        assert not Loop("inception_v3", batch=2, image_size=75, device="meta").model.AuxLogits


@needs_transformers
@pytest.mark.parametrize(("model", "millions"), [("bert", 335), ("gpt2", 124), ("gpt2-xl", 1557)])
def test_language_models_have_their_published_size_on_a_gpu(model: str, millions: int) -> None:
    loop = replace(on_gpu()[model], device="meta", batch=1, tokens=8).loop(seed=0)
    assert loop.num_parameters // 1_000_000 == millions


@needs_transformers
def test_bert_predicts_what_is_masked_and_gpt_what_comes_next() -> None:
    torch.manual_seed(0)
    inputs, target = Language("bert", small=True).batch(4, 64)
    is_masked = inputs.flatten() == 0
    assert 0 < is_masked.sum() < 0.3 * len(target)
    assert torch.equal(target == IGNORED, ~is_masked)
    inputs, target = Language("gpt2", small=True).batch(4, 64)
    assert inputs.shape == (4, 64)
    assert torch.equal(target.view(4, 64)[:, :-1], inputs[:, 1:])


@needs_torchvision
def test_images_of_a_folder_come_again_after_the_last(tmp_path: Path) -> None:
    from checkfreq.examples.imagenet.images import Stream

    images = ImageSet(classes=2, train=5, val=1, smallest=40, largest=48)
    make(tmp_path, images=images)
    stream = Stream.of(tmp_path, image_size=32, batch=4, workers=0, seed=0)
    loop = Loop("resnet18", batch=4, source=stream.batches, num_classes=stream.num_classes)
    clean_window(loop, stream.batches_per_epoch + 1)
    inputs, target = next(stream.batches)
    assert (inputs.shape, target.shape) == ((4, 3, 32, 32), (4,))


@needs_torchvision
@needs_transformers
def test_a_model_of_each_kind_prints_its_three_arms(tmp_path: Path) -> None:
    small = ("--preset", "cpu", "--device", "cpu", "--batch", "2", "--seconds", "1")
    lines = lines_of(
        "paper",
        *(*small, "--model", "resnet18", "gpt2", "--tokens", "4", "--epoch-iterations", "400"),
        folder=tmp_path,
    )
    assert [(x["model"], x["arm"]) for x in lines] == [
        (model, arm)
        for model in ("resnet18", "gpt2")
        for arm in ("auto", "synchronous", "epoch boundary")
    ]
    for x in lines:
        iteration_s = x["iteration_ms"] / 1e3
        wanted = x["restore_s"] + x["k"] / 2 * iteration_s + x["durable_s"]
        assert x["recovery_s"] == pytest.approx(wanted, rel=0.01)
        assert x["state_mib"] > x["parameters"] * 8 / 2**20
    auto, still, epoch = lines[:3]
    assert auto["k"] == still["k"]
    assert auto["taken"] is not None
    assert (epoch["k"], epoch["held_ms"]) == (400, still["held_ms"])
    assert tables.gains(lines[:3]) == {"400 iterations": [epoch["recovery_s"] / auto["recovery_s"]]}
    cpu = f"cpu, 1 thread of {os.cpu_count()} cores"
    assert f"| resnet18, {cpu}, 2 × 32 px |" in tables.arms(lines)
    assert f"| gpt2, {cpu}, 2 × 4 tokens |" in tables.stalls(lines)


class TestNotes:
    def test_held_and_waited_are_of_the_rounds_that_overhead_is_of(self, tmp_path: Path) -> None:
        records = [WindowRecord(0.1, 0.0, range(1, 3), 2), WindowRecord(9.0, 8.0, range(3, 5), 2)]
        records += [WindowRecord(0.3, 0.2, range(5, 7), 2), WindowRecord(0.2, 0.1, range(7, 9), 2)]
        done = [Round({}, 1.0, foreign) for foreign in (0.0, 0.9, 0.05, 0.0)]
        events = [{"kind": "committed", "step": step} for step in (0, 2, 4, 5, 8, 9)]
        text = "".join(f"{json.dumps(x)}\n" for x in [*events, {"kind": "plan"}])
        (tmp_path / "events.jsonl").write_text(text)
        found = CheckpointCosts.of(kept(records, done), tmp_path)
        assert (found.checkpoints, found.held_s, found.wait_s) == (6, *approx(0.1, 0.05))
        assert [each["step"] for each in found.events] == [2, 5, 8]

    def test_a_note_is_of_one_window(self, tmp_path: Path) -> None:
        arm = FrozenArm(Loop("transformer", batch=1), tmp_path, interval=1, length=2)
        arm.warm_up()
        first = arm.manager.global_step + 1
        noted = RecordingArm(arm)
        noted.window()
        noted.window()
        assert [each.steps for each in noted.records] == [
            range(first, first + 2),
            range(first + 2, first + 4),
        ]
        assert sum(each.checkpoints for each in noted.records) == 4 * noted.taken
        assert all(each.held_s > each.wait_s >= 0 for each in noted.records)
        noted.close()


def approx(*values: float) -> list[Any]:
    return [pytest.approx(each) for each in values]


@pytest.mark.parametrize(
    ("each_s", "parts", "count"),
    [(0.1, 3, 4), (10.0, 3, 3), (10.0, 1, 4), (40.0, 2, 1), (1e9, 1, 1)],
)
def test_long_measurements_are_repeated_as_time_allows(
    each_s: float, parts: int, count: int, tmp_path: Path
) -> None:
    args = arguments(["--preset", "cpu", "--seconds", "100"])
    trial = Trial(on_cpu()["resnet18"], tmp_path, args)
    assert trial._repeats(4, each_s, parts=parts) == count


def test_a_model_that_fails_has_a_line_and_the_next_one_its_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"bert": ValueError("of /some/place"), "gpt2": SystemExit("no plan")}

    def measure(trial: Trial) -> Measurements:
        if error := broken.get(trial._workload.model):
            raise error
        return measurements()

    monkeypatch.setattr(Trial, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["paper", "--preset", "cpu", "--device", "cpu"])
    monkeypatch.setattr(paper.chosen, "__kwdefaults__", {"is_there": lambda _: True})
    sys.argv += ["--model", "bert", "gpt2", "resnet18"]
    paper.main()
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(x["model"], x["arm"], x.get("failed")) for x in lines[:2]] == [
        ("bert", "failed", "ValueError"),
        ("gpt2", "failed", "no plan"),
    ]
    assert [x["arm"] for x in lines[2:]] == ["auto", "synchronous", "epoch boundary"]
    assert "of /some/place" in err
    del sys.argv[-1]
    with pytest.raises(SystemExit, match="no model"):
        paper.main()
