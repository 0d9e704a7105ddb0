"""torch.distributed.checkpoint (DCP) over checkfreq's directories.

::

    dcp.load(state, storage_reader=CFStorageReader("chk/"))

DCP plans and reshards; here are only bytes. It wraps every failure of any rank in its
``CheckpointException``, a BaseException whose ``failures`` hold our errors by rank.
"""

from __future__ import annotations

from checkfreq.integrations.dcp.reader import CFStorageReader

__all__ = ["CFStorageReader"]
