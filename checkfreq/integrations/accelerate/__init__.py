"""Hugging Face accelerate: checkpoints of a loop that is written with an ``Accelerator``.

::

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with CFManager("chk/", checkpoint_of(accelerator)) as cf_manager:
        train_loader = AcceleratedIterator(loader, accelerator, cf_manager=cf_manager)
        cf_manager.restore()
        for epoch in train_loader.epochs(3):
            for batch in train_loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
"""

from __future__ import annotations

from checkfreq.integrations.accelerate.iterator import AcceleratedIterator
from checkfreq.integrations.accelerate.state import checkpoint_of

__all__ = ["AcceleratedIterator", "checkpoint_of"]
