"""Lightning: one callback, and a killed run continues in mid-epoch with the same bits.

::

    trainer = Trainer(callbacks=[CheckFreqCallback("chk/")])

Works with ``lightning`` and with ``pytorch_lightning``.
"""

from __future__ import annotations

from checkfreq.integrations.lightning.callback import CheckFreqCallback

__all__ = ["CheckFreqCallback"]
