"""The states and savers of `benchmarks.sharded`: ours, and torch.distributed.checkpoint's.

A saver stands in a training loop at two places, where it may hold the training thread: the
boundary (where it saves if asked to) and the entry of the weight update.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast

_COLUMNS = 1024
_PRUNED_WITHIN_S = 60.0


class State(Protocol):
    """What is saved, and what a weight update does to it."""

    module: nn.Module

    def change(self) -> None:
        """Write to every parameter."""
        ...


class ShardedState:
    """As FSDP2 leaves a model: float32 DTensors, their rows shared out to the ranks."""

    def __init__(self, num_bytes: int, *, num_tensors: int) -> None:
        mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
        rows = max(1, num_bytes // num_tensors // 4 // _COLUMNS // mesh.size())
        self.module = nn.Module()
        for index in range(num_tensors):
            local = torch.randn(rows, _COLUMNS)
            parameter = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
            self.module.register_parameter(f"part{index}", parameter)

    def change(self) -> None:
        """Write to every local shard."""
        with torch.no_grad():
            for part in self.module.parameters():
                part.to_local().add_(1.0)  # type: ignore[attr-defined]


class ReplicatedState:
    """As DDP has it: the same float32 tensors on every rank."""

    def __init__(self, num_bytes: int, *, num_tensors: int) -> None:
        torch.manual_seed(0)
        rows = max(1, num_bytes // num_tensors // 4 // _COLUMNS)
        self.module = nn.Module()
        for index in range(num_tensors):
            parameter = nn.Parameter(torch.randn(rows, _COLUMNS))
            self.module.register_parameter(f"part{index}", parameter)

    def change(self) -> None:
        """Write to every parameter, the same on every rank."""
        with torch.no_grad():
            for part in self.module.parameters():
                part.add_(1.0)


class Saver(Protocol):
    """One way to save, in the place where a training loop has it."""

    def boundary(self, *, save: bool) -> None:
        """Between two iterations; training stands still as long as it takes."""
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Around the weight update; training stands still as long as it takes to enter."""
        ...

    def is_durable(self) -> bool:
        """Whether, as far as this rank can say, the last save is on disk."""
        ...

    def finish(self) -> dict[str, float]:
        """Wait, clean up; seconds since the save as far as this rank can say, by what they are."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class CheckFreq:
    """A manager that saves when told to and keeps one checkpoint."""

    def __init__(self, folder: Path, state: State, *, split: bool = False) -> None:
        optimizer = torch.optim.SGD(state.module.parameters(), lr=0.1)
        self._folder = folder
        self._step, self._began_s = 0, 0.0
        self.manager = CFManager(
            folder,
            CFCheckpoint(model=state.module, optimizer=optimizer),
            mode=CFMode.MANUAL,
            chk_freq=0,
            retention=KeepLast(1),
            config=CFConfig(split_replicated=split),
        )

    def boundary(self, *, save: bool) -> None:
        """One of the manager's."""
        if save:
            self._began_s = time.perf_counter()
        self.manager.step()
        if save:
            self.manager.save()
            self._step = self.manager.global_step

    def updating(self) -> AbstractContextManager[None]:
        """Waits for the copy, if that is not done."""
        return self.manager.updating()

    def is_durable(self) -> bool:
        """The leader knows."""
        durable = self.manager.stats()["last_durable_step"]
        return dist.get_rank() != 0 or (durable is not None and durable >= self._step)

    def finish(self) -> dict[str, float]:
        """From the call to the worker's commit, by one clock; returns when the disk has rest."""
        self.manager.wait()
        committed = self._committed()
        self._wait_until_pruned()
        return {
            "durable_s": committed["durable_monotonic_s"] - self._began_s,
            "persist_s": committed["persist_s"],
        }

    def _committed(self) -> Mapping[str, Any]:
        """The last save's event; only the leader, who prunes after it, writes events down."""
        if dist.get_rank() == 0:
            lines = (self._folder / "events.jsonl").read_text().splitlines()
            events = [event for event in map(json.loads, lines) if event["kind"] == "committed"]
            assert events[-1]["step"] == self._step
            return events[-1]
        event = self.manager.last_event
        assert event is not None
        assert (event.kind, event.step) == ("committed", self._step)
        return event.data

    def _wait_until_pruned(self) -> None:
        """The checkpoint before is gone: its removal must not fall into another arm's sample."""
        deadline_s = time.monotonic() + _PRUNED_WITHIN_S
        while sum(1 for kind in ("step-*", ".trash-*") for _ in self._folder.glob(kind)) > 1:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nothing was pruned within {_PRUNED_WITHIN_S:.0f} s")
            time.sleep(0.01)

    def close(self) -> None:
        """Pass the last boundary, which is checkpointed, and end the worker."""
        self.manager.step()
        self.manager.close()


class Dcp:
    """``torch.distributed.checkpoint``, files synced, plans cached, staging memory kept.

    Each rank writes with as many threads as ours.
    ``staged_aside``: staging goes on in a thread, and the next weight update waits for it.
    """

    def __init__(
        self,
        folder: Path,
        state: State,
        *,
        kind: AsyncCheckpointerType | None,
        staged_aside: bool = False,
    ) -> None:
        self._folder, self._state, self._kind = folder, state, kind
        self._planner = DefaultSavePlanner(enable_plan_caching=True)
        self._group = dist.new_group(backend="gloo")  # its thread must not disturb training's
        in_process = kind is AsyncCheckpointerType.PROCESS
        options = StagingOptions(False, in_process, staged_aside, False)
        self._stager = None if kind is None else DefaultStager(options)
        self._count, self._began_s, self._durable_s = 0, 0.0, 0.0
        self._staging: Any = None
        self._upload: Any = None

    def boundary(self, *, save: bool) -> None:
        """Saves into a folder of its own."""
        if not save:
            return
        self._count += 1
        self._began_s, self._durable_s = time.perf_counter(), 0.0
        target = self._folder / f"step-{self._count}"
        common: dict[str, Any] = {
            "storage_writer": FileSystemWriter(
                target, sync_files=True, thread_count=CFConfig().writer_threads
            ),
            "planner": self._planner,
            "process_group": self._group,
        }
        state = {"model": self._state.module.state_dict()}
        if self._kind is None:
            dcp.save(state, **common)
            self._note_durable()
            return
        response = dcp.async_save(
            state, async_checkpointer_type=self._kind, async_stager=self._stager, **common
        )
        self._staging = getattr(response, "staging_completion", None)
        self._upload = getattr(response, "upload_completion", response)
        self._upload.add_done_callback(lambda _: self._note_durable())

    def _note_durable(self) -> None:
        self._durable_s = time.perf_counter() - self._began_s

    @contextlib.contextmanager
    def _after_staging(self) -> Any:
        if self._staging is not None:
            self._staging.result()
            self._staging = None
        yield

    def updating(self) -> AbstractContextManager[None]:
        """Waits for staging, if that goes on aside."""
        return self._after_staging()

    def is_durable(self) -> bool:
        """Once the future is done."""
        return self._durable_s > 0

    def finish(self) -> dict[str, float]:
        """The checkpoint before is removed, as a retention would."""
        if self._upload is not None:
            self._upload.result()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder / f"step-{self._count - 1}", ignore_errors=True)
        return {"durable_s": self._durable_s}

    def close(self) -> None:
        """End the stager's thread."""
        if self._stager is not None:
            self._stager.close()
