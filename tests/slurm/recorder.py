"""Runs a command, and appends the status it ended with, and when, to a file.

It outlives every signal that SLURM sends to all processes of a job, but for the kill at the end.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    status = subprocess.call(sys.argv[2:])
    with Path(sys.argv[1]).open("a") as ends:
        ends.write(json.dumps({"status": status, "at_unix_s": time.time()}) + "\n")
    sys.exit(status if status >= 0 else 128 - status)
