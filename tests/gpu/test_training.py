"""Whole trainings on a device: every checkpoint is its boundary's state, bit for bit.

The host runs ahead of the device, as in a real training: what each boundary was is cloned on the
device and compared at the end. A wait of the host would order what only events may order.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
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
#: The host queues several iterations in this time, which then run without a gap.
AHEAD = LONG // 10
WIDE = 4096
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adam_capturable": lambda m: torch.optim.Adam(
        m.parameters(), lr=torch.tensor(0.01, device=DEVICE), capturable=True
    ),
    "lbfgs": lambda m: torch.optim.LBFGS(
        m.parameters(), lr=0.1, max_iter=2, history_size=1
    ),  # a longer one outgrows its slots at every boundary
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
        nn.Linear(16 * width, WIDE),  # copying it takes longer than an iteration
        nn.ReLU(),
        nn.Linear(WIDE, 10),
    )
    return model.to(DEVICE, memory_format=layout)


def images() -> torch.Tensor:
    return torch.randn(8, 3, 16, 16, device=DEVICE)


def manager_of(chk_dir: Path, chk: CFCheckpoint, **changes: Any) -> CFManager:
    settings: dict[str, Any] = {
        "mode": CFMode.MANUAL,
        "chk_freq": 1,
        "retention": KeepLast(1000),
        "config": CFConfig(close_timeout_s=120.0, takeover_s=60.0),
    }
    return CFManager(chk_dir, chk, **{**settings, **changes})


class Boundaries:
    """What the state was where checkpoints began, for comparison with them; never waits."""

    def __init__(self, chk_dir: Path, **tracked: Any) -> None:
        self._chk_dir = chk_dir
        self._tracked = tracked
        self._states: dict[int, dict[str, Any]] = {}
        self._latest: dict[int, dict[str, Any]] = {}  # may be checkpointed at the end

    def pass_one(self, manager: CFManager) -> None:
        state = {name: cloned(state_of(part)) for name, part in self._tracked.items()}
        before = num_begun(manager)
        manager.step()
        self._latest = {manager.global_step: state}
        if num_begun(manager) > before:
            self._states |= self._latest

    def assert_equal_checkpoints(self, at_least: int) -> None:
        steps = [int(path.name[5:]) for path in sorted(self._chk_dir.glob("step-*"))]
        assert len(steps) >= at_least
        states = self._states | self._latest
        for step in steps:
            loaded = checkfreq.load(self._chk_dir, step=step)
            found = bits_of({name: loaded[name] for name in self._tracked})
            expected = bits_of(states[step])
            assert found.keys() == expected.keys()
            assert [name for name in expected if found[name] != expected[name]] == [], step
        shutil.rmtree(self._chk_dir)


def num_begun(manager: CFManager) -> int:
    stats = manager.stats()
    return sum(stats[f"num_{what}"] for what in ("committed", "failed", "in_flight"))


def state_of(part: Any) -> Any:
    """Its state_dict, but of a GradScaler, whose waits for the device, only the tensors."""
    if isinstance(part, torch.amp.GradScaler):
        return {"scale": part._scale, "_growth_tracker": part._growth_tracker}
    return part.state_dict()


def cloned(value: Any) -> Any:
    """The same containers with clones of tensors; on a device they are only queued."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [cloned(item) for item in value]
    return value


def bits_of(state: dict[str, Any]) -> dict[str, bytes]:
    """Of a scaler the two numbers that change: loaded they are no tensors."""
    bits = {}
    for name, value in state.items():
        if name == "scaler":
            numbers = {key: float(value[key]) for key in ("scale", "_growth_tracker")}
            bits.update(tensor_bits(numbers, name))
        else:
            bits.update(tensor_bits(value, name))
    return bits


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
        for _ in rounds(manager):
            if name == "lbfgs":
                manager.weight_update(closure=closure)
            else:
                closure()
                manager.weight_update()
            boundaries.pass_one(manager)
    boundaries.assert_equal_checkpoints(at_least=2)  # at LBFGS's growing state, those of a round


def rounds(manager: CFManager) -> Iterator[None]:
    """Three rounds of four iterations that the device begins once the host has queued them."""
    for _ in range(3):
        torch.cuda._sleep(AHEAD)
        for _ in range(4):
            yield
        await_slots(manager)
        manager.wait()


def await_slots(manager: CFManager) -> None:
    """A loop this fast would be over before there are slots, without a checkpoint."""
    assert manager._pipeline._arena.wait_ready(timeout_s=120.0)


def test_verify_settled_finds_nothing_in_a_loop_that_keeps_the_rules(tmp_path: Path) -> None:
    model = network()
    optimizer = OPTIMIZERS["adamw_fused"](model)
    boundaries = Boundaries(tmp_path, model=model, optimizer=optimizer)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    config = CFConfig(verify_settled=True, close_timeout_s=120.0, takeover_s=60.0)
    with manager_of(tmp_path, chk, config=config) as manager:
        for _ in range(4):
            model(images()).square().mean().backward()
            manager.weight_update()
            boundaries.pass_one(manager)
            await_slots(manager)
        manager.wait()
    boundaries.assert_equal_checkpoints(at_least=2)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_steps_is_checkpointed_as_it_is(tmp_path: Path, fused: bool) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**30, growth_interval=2)
    boundaries = Boundaries(tmp_path, model=model, optimizer=optimizer, scaler=scaler)
    chk = CFCheckpoint(model=model, optimizer=optimizer, scaler=scaler)
    with manager_of(tmp_path, chk) as manager:
        for _ in rounds(manager):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.float16):
                loss = model(images()).float().square().mean()
            scaler.scale(loss).backward()
            manager.weight_update(scaler=scaler)
            boundaries.pass_one(manager)
    boundaries.assert_equal_checkpoints(at_least=3)


def captured_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.cuda.CUDAGraph:
    """A whole iteration as a graph."""

    def iterate() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    return captured(iterate)


def captured(iterate: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The call as a graph, after three on a side stream, as the manual asks."""
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
        for _ in rounds(manager):
            batch.copy_(images())
            with manager.updating():
                graph.replay()
            boundaries.pass_one(manager)
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
            if step == 1:
                await_slots(manager)
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
            if step == 1:
                await_slots(manager)
            manager.wait()
        steps, stats = manager.all_steps(), manager.stats()
        weight.data.fill_(6)  # the boundary's, for the checkpoint that close() may take
    assert stats["num_failed"] >= 1
    for step in steps:
        (found,) = checkfreq.load(tmp_path, step=step)["model"].values()
        assert bool((found == step).all())


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
            await_slots(manager)
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


def digest_of(state: dict[str, Any]) -> str:
    """Of model and optimizer, every bit."""
    hashed = hashlib.sha256()
    for name, bits in sorted(
        bits_of({name: state[name] for name in ("model", "optimizer")}).items()
    ):
        hashed.update(f"{name} {len(bits)} ".encode())
        hashed.update(bits)
    return hashed.hexdigest()
