"""torch.distributed.checkpoint (DCP) over checkfreq's directories, in both directions.

::

    dcp.load(state, storage_reader=CFStorageReader("chk/"))
    dcp.save(state, storage_writer=CFStorageWriter("chk/", step=1200))

DCP plans and reshards; this package only moves bytes. DCP wraps the errors of all ranks in its
``CheckpointException``, a BaseException whose ``failures`` hold them by rank.
"""

from __future__ import annotations

from checkfreq.integrations.dcp.reader import CFStorageReader
from checkfreq.integrations.dcp.writer import CFStorageWriter

__all__ = ["CFStorageReader", "CFStorageWriter"]
