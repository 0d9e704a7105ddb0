"""Hugging Face transformers: checkpoints of a ``Trainer``, by one callback.

::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[CheckFreqCallback("chk/")])
    trainer.train()  # continues where the run before was killed, in mid-epoch too
"""

from __future__ import annotations

from checkfreq.integrations.transformers.callback import CheckFreqCallback

__all__ = ["CheckFreqCallback"]
