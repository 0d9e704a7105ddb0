"""Which of accelerate's strategies can be resumed exactly. Training thread only."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType

from checkfreq.errors import ConfigError

#: Strategies that keep state, or write weights, where nobody outside can read it in step.
_REFUSED = {
    DistributedType.DEEPSPEED: (
        "DeepSpeed",
        "its engine keeps the weights that it updates in partitions of its own and steps them "
        "itself, so no boundary is seen",
        "use FSDP2 (fsdp_version=2), or the engine's own checkpoints",
    ),
    DistributedType.MEGATRON_LM: (
        "Megatron-LM",
        "its optimizer keeps partitions of its own and steps them itself, so no boundary is seen",
        "use FSDP2 (fsdp_version=2)",
    ),
    DistributedType.XLA: (
        "TPU (XLA)",
        "the memory of such a device cannot be read while training runs",
        "use CUDA, ROCm or the CPU",
    ),
}


def require_exact(accelerator: Any, asked: str) -> None:
    """ConfigError if the strategy of ``accelerator`` cannot be resumed bit for bit.

    ``asked`` names who needs it, for the message.
    """
    if accelerator.distributed_type in _REFUSED:
        raise _refused(asked, *_REFUSED[accelerator.distributed_type])
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise _refused(
            asked,
            "FSDP1",
            "it flattens parameters into buffers of its own, whose shards have no names to be "
            "restored by",
            "use FSDP2 (fsdp_version=2)",
        )


def _refused(asked: str, strategy: str, reason: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{asked}: {strategy} cannot be resumed bit for bit: {reason}. Expected a single process, "
        f"DDP or FSDP2; {instead}"
    )
