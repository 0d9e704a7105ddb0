"""The lines of `benchmarks.frequency`: arms, equal intervals, policies, and the target."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.frequency.decided import Choice
from benchmarks.frequency.findings import Findings, Setting
from benchmarks.lab import record
from benchmarks.lab.overheads import Measured
from benchmarks.lab.training import Loop
from benchmarks.peers import OURS, Peer
from checkfreq.examples.imagenet.models import MODELS as IMAGE_MODELS


class Report:
    """Prints the findings of a run on ``peers``, with each setting that was ``measured``."""

    def __init__(
        self,
        loop: Loop,
        args: argparse.Namespace,
        peers: Mapping[str, Peer],
        *,
        found: Findings,
        measured: Mapping[Setting, Measured],
    ) -> None:
        self._loop, self._args, self._peers = loop, args, peers
        self._found, self._measured = found, measured

    def emit(self, policies: Mapping[str, Choice], settings: Mapping[str, Setting | None]) -> None:
        """Print all lines; ``settings`` are those that measured the policies' intervals."""
        for name in self._peers:
            self._print_arm(name)
        for name in self._peers:
            for k in self._args.k:
                self._emit("equal", arm=name, k=k, **_overhead(self._measured[name, k]))
        for name, choice in policies.items():
            self._print_policy(name, choice, settings[name])
        if self._found.rivals:
            self._print_target()

    def _print_arm(self, name: str) -> None:
        cost, peer, k = self._found.costs[name], self._peers[name], self._found.smallest_kept(name)
        self._emit(
            "arm",
            arm=name,
            synced=peer.synced,
            note=peer.note,
            packages=peer.packages,
            saves=cost.num_saves,
            **_milliseconds("cost", cost.cost_s, cost.cost_interval_s),
            **_milliseconds("durable", cost.durable_s, cost.durable_interval_s),
            k_cost=cost.smallest.by_cost,
            k_storage=cost.smallest.by_storage,
            k_min=cost.smallest.k,
            k=k,
            **_overhead(None if k is None else self._measured[name, k]),
            lost_s=round(cost.lost_s(k or cost.smallest.k), 3),
        )

    def _print_policy(self, name: str, choice: Choice, setting: Setting | None) -> None:
        k = choice.k
        self._emit(
            "policy",
            arm=name,
            k=k,
            k_first=choice.first,
            windows=choice.windows,
            place=choice.place.value,
            lost_s=None if k is None else round(self._found.costs[OURS].lost_s(k), 3),
            **_overhead(None if setting is None else self._measured.get(setting)),
        )

    def _print_target(self) -> None:
        verdict = self._found.verdict()
        equal = [self._found.equal(k) for k in self._args.k]
        self._emit(
            "target",
            arm=OURS,
            rival=verdict.rival,
            k=verdict.k,
            k_rival=verdict.k_rival,
            ratio=round(verdict.ratio, 4),
            allowed=verdict.allowed,
            met=verdict.met,
            equal=[
                {"k": each.k, "rival": each.rival, "met": each.met, "apart": each.is_apart}
                for each in equal
            ],
            equal_met=all(each.met for each in equal),
        )

    def _emit(self, what: str, *, packages: tuple[str, ...] = (), **fields: Any) -> None:
        args = self._args
        is_images = args.model in IMAGE_MODELS
        record.emit(
            "frequency",
            folder=Path(args.folder),
            packages=packages,
            what=what,
            model=args.model,
            batch=args.batch,
            **({"image_size": args.image_size} if is_images else {"tokens": args.tokens}),
            device=self._loop.device.type,
            amp=args.amp,
            threads=args.threads,
            bound=args.bound,
            state_mib=round(_state_bytes(self._loop) / 2**20, 1),
            iteration_ms=round(self._found.costs[OURS].iteration_s * 1e3, 2),
            **fields,
        )


def _overhead(measured: Measured | None) -> dict[str, Any]:
    if measured is None:
        return {"overhead": None, "low": None, "high": None, "rounds": 0}
    found = measured.estimate
    return {
        "overhead": _rounded(found.mean),
        "low": _rounded(found.low),
        "high": _rounded(found.high),
        "rounds": measured.num_rounds - measured.num_left_out,
    }


def _milliseconds(name: str, seconds: float, interval_s: tuple[float, float]) -> dict[str, Any]:
    low, high = (None if math.isinf(limit) else round(limit * 1e3, 2) for limit in interval_s)
    return {f"{name}_ms": round(seconds * 1e3, 2), f"{name}_low_ms": low, f"{name}_high_ms": high}


def _rounded(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def _state_bytes(loop: Loop) -> int:
    optimizer = [x for entries in loop.optimizer.state.values() for x in entries.values()]
    tensors = [*loop.model.state_dict().values(), *optimizer]
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))
