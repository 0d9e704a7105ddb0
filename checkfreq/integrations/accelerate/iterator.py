"""``CFIterator`` for a loop that is written with an ``Accelerator``. Training thread only."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device

from checkfreq.errors import ConfigError
from checkfreq.integrations.accelerate.strategies import require_exact
from iterators import CFIterator
from iterators.protocol import Adapter


class AcceleratedIterator(CFIterator):
    """Iterates over ``loader`` in place of what ``accelerator.prepare(loader)`` returns.

    Like ``CFIterator``, whose arguments it takes. It also moves each batch to the accelerator's
    device, and tells the accelerator of the last batch of an epoch, at which
    ``accelerator.accumulate`` has gradients exchanged and used.

    ``loader`` is one that was not prepared: its samples are shared among the ranks here, each of
    them once, in an order that can be entered at any place. accelerate's own loader cannot be: it
    fetches one batch ahead, draws from the generators of training, and fills up the last batch.

    Raises ConfigError for a strategy that cannot be resumed exactly (DeepSpeed, FSDP1, Megatron-LM,
    TPUs) and for ``split_batches``, and ``NotResumableError`` for a loader that was prepared.
    """

    #: What accelerate's ``GradientState`` asks of the loader that is being iterated over.
    end_of_dataloader = False
    remainder = 0

    def __init__(
        self, loader: Iterable[Any] | Adapter, accelerator: Accelerator, **arguments: Any
    ) -> None:
        require_exact(accelerator, "AcceleratedIterator")
        if accelerator.num_processes > 1 and accelerator.split_batches:
            raise ConfigError(
                "AcceleratedIterator: expected an Accelerator without split_batches, under which "
                "ranks get parts of a batch; found it set. Leave it out, and divide the loader's "
                "batch_size by the number of ranks"
            )
        self._accelerator: Any = accelerator
        super().__init__(loader, **arguments)

    def __iter__(self) -> Iterator[Any]:
        """See ``CFIterator``."""
        return self._told(super().__iter__())

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """See ``CFIterator``."""
        return self._told(super().enumerate(start))

    def evaluate(self) -> Iterator[Any]:
        """See ``CFIterator``."""
        device = self._accelerator.device
        batches = super().evaluate()
        return (send_to_device(batch, device) for batch in batches)

    def steps(self, total: int) -> Iterator[Any]:
        """See ``CFIterator``."""
        return self._told(super().steps(total))

    def _told(self, batches: Any) -> Generator[Any, None, None]:
        """The batches on the device, with what the accelerator has to know about each."""
        gradients, device = self._accelerator.gradient_state, self._accelerator.device
        # A loader without a length tells by fetching a batch ahead: only where it is needed.
        asks = gradients.num_steps > 1 or self._adapter.num_batches() is not None
        self.end_of_dataloader = False
        gradients._add_dataloader(self)
        try:
            for batch in batches:
                self.end_of_dataloader = asks and self.is_last_batch
                yield send_to_device(batch, device)
        finally:
            batches.close()
            gradients._remove_dataloader(self)
