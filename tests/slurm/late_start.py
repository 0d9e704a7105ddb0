"""`tests.slurm.trainer` on a machine where imports take long: the first run has to be told to stop.

It has no handler for any signal yet, as Python has none while torch is imported.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    begun = Path(sys.argv[-1]).with_suffix(".begun")
    if not begun.exists():
        begun.touch()
        signal.pause()
    from tests.slurm.trainer import main

    main()
