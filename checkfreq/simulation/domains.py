"""What fails, how often, and what it takes down: a process, a node that comes back, a node, a rack.

A process that dies leaves its node's memory, so the run restarts from the snapshots there, the
newest one included. A node that reboots has lost its memory but not its disks; one that is
replaced, or a rack, has lost both. Rates are per process (GPU), node and rack, so the time between
failures falls as the cluster grows; a rack that is only partly used fails in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import is_amount
from checkfreq.simulation.failures import Rate


class Domain(Enum):
    """What one failure takes down, the least first."""

    PROCESS = "process"
    REBOOT = "reboot"
    NODE = "node"
    RACK = "rack"


#: What the 419 unexpected interruptions of 16,384 GPUs took down (The Llama 3 herd of models, 2024,
#: table 5). The causes are theirs, what each took down is our reading. PROCESS: software bugs 54,
#: NCCL timeouts 7, dependencies 2. REBOOT: HBM3 72, SRAM 19, system processor 17, maintenance of
#: the host 32. RACK: switches and cables 35. NODE: the rest. It is on the safe side: DLRover's blog
#: on its flash checkpoints says that a new process cures about 75 %.
PUBLISHED: Mapping[Domain, float] = {
    Domain.PROCESS: 63 / 419,
    Domain.REBOOT: 140 / 419,
    Domain.NODE: 181 / 419,
    Domain.RACK: 35 / 419,
}
#: A spot machine that was taken away does not come back.
_PREEMPTED: Mapping[Domain, float] = {Domain.NODE: 1.0}


def shares_of(rate: Rate) -> Mapping[Domain, float]:
    """The part of the failures of a published rate that each domain has."""
    return _PREEMPTED if rate is Rate.SPOT else PUBLISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Failures per day of each GPU's process, of each node (two ways), and of each rack.

    The defaults for nodes and racks are those of the cluster that ``PUBLISHED`` is of: 8 GPUs in a
    node, 2 nodes in a rack.
    """

    per_day: Mapping[Domain, float]
    gpus_per_node: int = 8
    nodes_per_rack: int = 2

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "nodes_per_rack"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for domain, rate in self.per_day.items():
            if not is_amount(rate):
                raise ConfigError(
                    f"failures of a {domain.value} per day: expected a finite number >= 0, got "
                    f"{rate}"
                )

    @classmethod
    def published(
        cls,
        per_gpu_day: float,
        shares: Mapping[Domain, float] = PUBLISHED,
        *,
        gpus_per_node: int = 8,
        nodes_per_rack: int = 2,
    ) -> Hierarchy:
        """``per_gpu_day`` failures of any kind per GPU and day, shared out among the domains."""
        bare = cls(per_day={}, gpus_per_node=gpus_per_node, nodes_per_rack=nodes_per_rack)
        rates = {each: per_gpu_day * part * bare.gpus_in(each) for each, part in shares.items()}
        return cls(per_day=rates, gpus_per_node=gpus_per_node, nodes_per_rack=nodes_per_rack)

    def with_rates(self, per_day: Mapping[Domain, float]) -> Hierarchy:
        """With these rates in place of those of the same domains."""
        return Hierarchy(
            per_day={**self.per_day, **per_day},
            gpus_per_node=self.gpus_per_node,
            nodes_per_rack=self.nodes_per_rack,
        )

    def gpus_in(self, domain: Domain) -> int:
        """The GPUs of one process, node or rack."""
        if domain is Domain.PROCESS:
            return 1
        return self.gpus_per_node * (self.nodes_per_rack if domain is Domain.RACK else 1)

    def at(self, num_gpus: int) -> dict[Domain, float]:
        """Failures per day of a whole cluster; ConfigError if it never fails."""
        if num_gpus < 1:
            raise ConfigError(f"num_gpus: expected at least 1, got {num_gpus}")
        found = {
            domain: rate * num_gpus / self.gpus_in(domain)
            for domain, rate in self.per_day.items()
            if rate
        }
        if not found:
            raise ConfigError("failures per day: expected one above 0")
        return found
