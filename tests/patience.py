"""How long tests wait, on a machine that may have other work to do.

A deadline that only a defect reaches is simply long. One that a test waits out is short, and
multiplied by what the machine is short of at that moment.
"""

from __future__ import annotations

import os
from pathlib import Path


def slowness() -> float:
    """How many processes want each core right now; 1 to 10, so that long limits stay longer."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return 1.0
    return min(max(1.0, running / (os.cpu_count() or 1)), 10.0)
