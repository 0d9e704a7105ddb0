"""What was logged so far: sums over the epoch, torchmetrics, and the values that others monitor.

Lightning drops all of it in a resume. An epoch's mean of a loss, and with it the best checkpoint, a
plateau's learning rate and early stopping, would then depend on where a run was killed. Each rank
keeps its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from checkfreq.errors import StateError

_FLAGS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)


class LoggedMetrics:
    """The trainer's results of the training epoch, and the module's metrics."""

    def __init__(self, trainer: Any, module: nn.Module) -> None:
        self._trainer, self._module = trainer, module

    def state_dict(self) -> dict[str, Any]:
        """The state on this rank."""
        connector = self._trainer._logger_connector
        return {
            "results": {name: _result(name, one) for name, one in self._results.items()},
            "metrics": {name: _metric(one) for name, one in self._metrics()},
            "callback": dict(connector._callback_metrics),
            "logged": dict(connector._logged_metrics),
            "progress_bar": dict(connector._progress_bar_metrics),
            # What tells the first `self.log` of an epoch, which clears the sums, from later ones.
            "is_first": connector._first_loop_iter,
            "logged_in": connector._current_fx,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it; results are made anew."""
        live = dict(self._metrics())
        for name, saved in state["metrics"].items():
            if name in live:
                _load_metric(live[name], saved)
        self._results.clear()
        for name, saved in state["results"].items():
            self._results[name] = self._made(saved)
        connector = self._trainer._logger_connector
        connector._callback_metrics = state["callback"]
        connector._logged_metrics = state["logged"]
        connector._progress_bar_metrics = state["progress_bar"]
        connector._first_loop_iter = state["is_first"]
        connector._current_fx = state["logged_in"]

    @property
    def _results(self) -> dict[str, Any]:
        results: dict[str, Any] = self._trainer.fit_loop.epoch_loop._results
        return results

    def _metrics(self) -> list[tuple[str, Metric]]:
        found = self._module.named_modules()
        return [(name, one) for name, one in found if isinstance(one, Metric)]

    def _made(self, saved: dict[str, Any]) -> Any:
        """A result as ``self.log`` made it."""
        kinds = import_module(type(self._results).__module__)
        meta = kinds._Metadata(**saved["meta"], reduce_fx=getattr(torch, saved["reduce"]))
        meta.sync = kinds._Sync(
            _should=saved["sync"],
            fn=self._trainer.strategy.reduce,
            rank_zero_only=saved["rank_zero_only"],
        )
        result = kinds._ResultMetric(meta, saved["is_tensor"])
        result.has_reset = saved["has_reset"]
        if saved["is_tensor"]:
            _load_metric(result, saved["state"])
        else:
            result.value = self._module.get_submodule(saved["meta"]["metric_attribute"])
            result._forward_cache = result.value._forward_cache
        return result


def _result(name: str, result: Any) -> dict[str, Any]:
    sync = result.meta.sync
    if sync.group is not None:
        raise StateError(
            f"{name} is logged with sync_dist_group=, and a process group cannot be kept: expected "
            "none. Reduce the value yourself, and log the result"
        )
    if not result.is_tensor and result.meta.metric_attribute is None:
        raise StateError(
            f"{name} is logged as a Metric that is no attribute of the LightningModule: expected "
            "one that is, so that it is found again. Set self.NAME = the metric"
        )
    return {
        "meta": {flag: getattr(result.meta, flag) for flag in _FLAGS},
        "reduce": result.meta.reduce_fx.__name__,
        "sync": sync.should,
        "rank_zero_only": sync.rank_zero_only,
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "state": _metric(result) if result.is_tensor else None,
    }


def _metric(metric: Metric) -> dict[str, Any]:
    return {
        "values": {name: getattr(metric, name) for name in metric._defaults},
        "forward": metric._forward_cache,
        "updates": metric._update_count,
    }


def _load_metric(metric: Metric, saved: dict[str, Any]) -> None:
    for name, value in saved["values"].items():
        setattr(metric, name, _on(metric.device, value))
    metric._forward_cache = saved["forward"]
    metric._update_count = saved["updates"]
    metric._computed = None


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [one.to(device) for one in value]
