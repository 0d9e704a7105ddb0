"""What tests of a checkpoint directory need: a disk that forgets, and a contract to pass.

* `CrashingFileOps`: `FileOps` in memory. It knows what was synced, can lose power or fail
  before any of its operations, and then gives every disk that could be found afterwards.
* `FileOpsContract`: derive a ``Test...`` class from it, with fixtures ``ops`` and ``root``
  (an empty directory), to hold your own `FileOps` to what the store relies on. Where a link is
  not made by ``os.symlink`` it overrides ``plant_link``.
* `commit_bytes`: one small, valid checkpoint, for tests of what comes after it.
"""

from __future__ import annotations

from checkfreq.testing.contract import FileOpsContract, commit_bytes, page_aligned
from checkfreq.testing.crashing import CrashingFileOps, PowerCut

__all__ = ["CrashingFileOps", "FileOpsContract", "PowerCut", "commit_bytes", "page_aligned"]
