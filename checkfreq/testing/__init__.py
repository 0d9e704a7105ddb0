"""For tests of checkpoint directories: a file system that loses power, and a contract suite.

* `CrashingFileOps`: `FileOps` in memory. It tracks what was synced, can fail or lose power before
  any operation, and then enumerates every state that the disk could be in afterwards.
* `FileOpsContract`: tests what the store relies on. Derive a ``Test...`` class from it, with the
  fixtures ``ops`` (your `FileOps`) and ``root`` (an empty directory). Override ``plant_link`` if
  ``os.symlink`` cannot make a link there.
* `commit_bytes`: commits one small, valid checkpoint.
* `page_aligned`: bytes in memory that direct I/O accepts.
"""

from __future__ import annotations

from checkfreq.testing.contract import FileOpsContract, commit_bytes, page_aligned
from checkfreq.testing.crashing import CrashingFileOps, PowerCut

__all__ = ["CrashingFileOps", "FileOpsContract", "PowerCut", "commit_bytes", "page_aligned"]
