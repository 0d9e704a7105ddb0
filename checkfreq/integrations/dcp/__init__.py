"""torch.distributed.checkpoint (DCP) over checkfreq's directories, in both directions.

::

    dcp.load(state, storage_reader=CFStorageReader("chk/"))
    dcp.save(state, storage_writer=CFStorageWriter("chk/", step=1200))

DCP plans and reshards; here are only bytes. It wraps every failure of any rank in its
``CheckpointException``, a BaseException whose ``failures`` hold our errors by rank.
"""

from __future__ import annotations

from checkfreq.integrations.dcp.reader import CFStorageReader
from checkfreq.integrations.dcp.writer import CFStorageWriter

__all__ = ["CFStorageReader", "CFStorageWriter"]
