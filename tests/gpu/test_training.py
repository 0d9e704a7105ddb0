"""Whole trainings on a device: every checkpoint is its boundary's state, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from checkfreq.errors import StateError

#: Warnings of CUDA libraries and of PyTorch's own debug modes are not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

DEVICE = "cuda"
LONG = 4_000_000_000  # cycles: about two seconds
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adam_capturable": lambda m: torch.optim.Adam(
        m.parameters(), lr=torch.tensor(0.01, device=DEVICE), capturable=True
    ),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2),
}


def network(width: int = 64, *, layout: torch.memory_format = torch.channels_last) -> nn.Module:
    """Volatile state (BatchNorm), settled state small and large, strided weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * width, 10),
    )
    return model.to(DEVICE, memory_format=layout)


def images() -> torch.Tensor:
    return torch.randn(8, 3, 16, 16, device=DEVICE)


def manager_of(chk_dir: Path, chk: CFCheckpoint, **changes: Any) -> CFManager:
    settings: dict[str, Any] = {
        "mode": CFMode.MANUAL,
        "chk_freq": 1,
        "retention": KeepLast(1000),
        "config": CFConfig(verify_settled=True, close_timeout_s=120.0, takeover_s=60.0),
    }
    return CFManager(chk_dir, chk, **{**settings, **changes})


class Boundaries:
    """What each boundary's state was, for comparison with the checkpoints of those steps."""

    def __init__(self, chk_dir: Path, **tracked: Any) -> None:
        self._chk_dir = chk_dir
        self._tracked = tracked
        self._bits: dict[int, dict[str, bytes]] = {}

    def pass_one(self, manager: CFManager) -> None:
        bits = {}
        for name, part in self._tracked.items():
            bits.update(tensor_bits(part.state_dict(), name))
        manager.step()
        self._bits[manager.global_step] = bits

    def assert_equal_checkpoints(self, at_least: int) -> None:
        steps = [int(path.name[5:]) for path in sorted(self._chk_dir.glob("step-*"))]
        assert len(steps) >= at_least
        for step in steps:
            found: dict[str, bytes] = {}
            for name, value in checkfreq.load(self._chk_dir, step=step).items():
                if name in self._tracked:
                    found.update(tensor_bits(value, name))
            expected = self._bits[step]
            assert found.keys() == expected.keys()
            assert [name for name in expected if found[name] != expected[name]] == [], step


def tensor_bits(value: Any, path: str) -> dict[str, bytes]:
    """The bytes of every tensor and the text of every number in nested containers."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return {path: flat.view(torch.uint8).numpy().tobytes()}
    if isinstance(value, int | float):
        return {path: repr(value).encode()}
    if not isinstance(value, dict | list | tuple):
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, item in items for k, v in tensor_bits(item, f"{path}.{key}").items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_checkpoint_is_its_boundary(tmp_path: Path, name: str) -> None:
    flat = name == "lbfgs"  # it cannot view strided gradients
    model = network(layout=torch.contiguous_format if flat else torch.channels_last)
    optimizer = OPTIMIZERS[name](model)
    boundaries = Boundaries(tmp_path, model=model, optimizer=optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(images()).square().mean()
        loss.backward()
        return loss

    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with manager_of(tmp_path, chk) as manager:
        for step in range(12):
            if name == "lbfgs":
                manager.weight_update(closure=closure)
            else:
                closure()
                manager.weight_update()
            boundaries.pass_one(manager)
            if step % 4 == 3:
                manager.wait()
    boundaries.assert_equal_checkpoints(at_least=4)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_steps_is_checkpointed_as_it_is(tmp_path: Path, fused: bool) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**30, growth_interval=2)
    boundaries = Boundaries(tmp_path, model=model, optimizer=optimizer, scaler=scaler)
    chk = CFCheckpoint(model=model, optimizer=optimizer, scaler=scaler)
    with manager_of(tmp_path, chk) as manager:
        for step in range(12):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.float16):
                loss = model(images()).float().square().mean()
            scaler.scale(loss).backward()
            manager.weight_update(scaler=scaler)
            boundaries.pass_one(manager)
            if step % 4 == 3:
                manager.wait()
    boundaries.assert_equal_checkpoints(at_least=3)


def captured_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.cuda.CUDAGraph:
    """A whole iteration as a graph, warmed up on a side stream as the manual asks."""

    def iterate() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            iterate()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate()
    return graph


def test_replays_inside_updating_are_ordered_after_the_copy(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)
    boundaries = Boundaries(tmp_path, model=model, optimizer=optimizer)
    batch = images()
    # A replay is forward, backward and update at once: its writes all come after the fence.
    with manager_of(tmp_path, CFCheckpoint(model=model, optimizer=optimizer)) as manager:
        graph = captured_step(model, optimizer, batch)
        for step in range(12):
            batch.copy_(images())
            with manager.updating():
                graph.replay()
            boundaries.pass_one(manager)
            if step % 4 == 3:
                manager.wait()
    boundaries.assert_equal_checkpoints(at_least=3)


def test_replays_outside_updating_are_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)
    with pytest.raises(StateError, match="updating"):
        run_unannounced(tmp_path, model, optimizer)


def run_unannounced(chk_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with manager_of(chk_dir, CFCheckpoint(model=model, optimizer=optimizer)) as manager:
        graph = captured_step(model, optimizer, images())
        graph.replay()
        manager.step()


def test_replays_of_a_graph_that_is_older_than_the_manager_tear_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No hook was there to see the capture. Expected values are cloned in the stream's order."""
    model = network(256)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True)
    graph = captured_step(model, optimizer, images())
    expected: dict[int, dict[str, torch.Tensor]] = {}
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with manager_of(tmp_path, chk, config=CFConfig()) as manager:
        for step in range(1, 13):
            torch.cuda._sleep(LONG // 100)  # the host runs ahead
            graph.replay()
            manager.step()
            expected[step] = {name: value.clone() for name, value in model.state_dict().items()}
            if step % 4 == 0:
                manager.wait()
        steps = manager.all_steps()
    assert len(steps) >= 3
    for step in steps:
        found = checkfreq.load(tmp_path, step=step)["model"]
        assert tensor_bits(found, "") == tensor_bits(expected[step], ""), step
    warnings = [r.getMessage() for r in caplog.records if "no update was seen" in r.getMessage()]
    assert len(warnings) == 1


def test_a_write_that_bypasses_the_hook_under_the_copy_voids_the_snapshot(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(64 << 20, device=DEVICE))  # copied for milliseconds
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with manager_of(tmp_path, chk, config=CFConfig()) as manager:
        for step in range(1, 7):
            with manager.updating():
                weight.data.fill_(step)
            manager.step()
            weight.data.fill_(-step)
            manager.wait()
        steps, stats = manager.all_steps(), manager.stats()
        weight.data.fill_(6)  # the boundary's, for the checkpoint that close() may take
    assert stats["num_failed"] >= 1
    for step in steps:
        (found,) = checkfreq.load(tmp_path, step=step)["model"].values()
        assert found.unique().tolist() == [step]


def test_step_and_weight_update_never_wait_for_the_device(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    chk = CFCheckpoint(model=model, optimizer=optimizer)

    def iterate(manager: CFManager) -> None:
        optimizer.zero_grad()
        model(images()).square().mean().backward()
        manager.weight_update()
        manager.step()

    with manager_of(tmp_path, chk, config=CFConfig()) as manager:
        for _ in range(2):  # everything is allocated once, for two snapshots in flight
            torch.cuda._sleep(LONG // 20)
            iterate(manager)
            iterate(manager)
            manager.wait()
        num_deferred = manager.stats()["num_deferred"]
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        behind = torch.cuda.Event()
        behind.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                iterate(manager)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not behind.query(), "the host waited for the device"
        assert manager.stats()["num_in_flight"] == 2, "both snapshots were taken"
        torch.cuda.synchronize()
        manager.wait()
        assert manager.stats()["num_deferred"] == num_deferred


def test_a_model_moved_after_the_manager_was_made_is_followed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 300))
    boundaries = Boundaries(tmp_path, model=model)
    with manager_of(tmp_path, CFCheckpoint(model=model)) as manager:
        boundaries.pass_one(manager)
        manager.wait()
        model.to(DEVICE)
        model(torch.randn(8, 4, device=DEVICE))
        boundaries.pass_one(manager)
        manager.wait()
    boundaries.assert_equal_checkpoints(at_least=2)


def test_auto_measures_plans_and_checkpoints_boundaries_only(tmp_path: Path) -> None:
    model = network(256)
    optimizer = OPTIMIZERS["adamw_fused"](model)
    boundaries = Boundaries(tmp_path, model=model, optimizer=optimizer)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    settings: dict[str, Any] = {"mode": CFMode.AUTO, "chk_freq": None, "max_overhead": 0.5}
    with manager_of(tmp_path, chk, **settings) as manager:
        for _ in range(3000):
            model(images()).square().mean().backward()
            manager.weight_update()
            optimizer.zero_grad()
            boundaries.pass_one(manager)
            if manager.stats()["interval_steps"] is not None:
                break
        stats = manager.stats()
    assert stats["interval_steps"] >= 1
    assert 0 < stats["overlap_s"] < stats["iteration_s"]
    assert stats["host_copy_s"] > 0
    assert stats["num_bad_samples"] == 0
    boundaries.assert_equal_checkpoints(at_least=1)


@pytest.mark.crash
@pytest.mark.parametrize("name", ["adamw_fused", "sgd"])
def test_resumed_after_sigkill_it_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    expected = run_child(tmp_path / "whole", name, kill_after=None)
    assert expected
    for kill_after in (2, 7, 3):
        assert run_child(tmp_path / "killed", name, kill_after=kill_after) == ""
    assert run_child(tmp_path / "killed", name, kill_after=None) == expected


def run_child(chk_dir: Path, name: str, *, kill_after: int | None) -> str:
    """Train in a child; SIGKILL after so many of its lines. Its last line if it ended."""
    command = [sys.executable, "-m", "tests.gpu.train_child", str(chk_dir), name]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parents[2]
    ) as child:
        assert child.stdout is not None
        last = ""
        for number, line in enumerate(child.stdout, start=1):
            last = line.strip()
            if number == kill_after:
                child.send_signal(signal.SIGKILL)
                break
        child.wait(timeout=120)
    if kill_after is not None:
        assert child.returncode == -signal.SIGKILL
        return ""
    assert child.returncode == 0
    return last
