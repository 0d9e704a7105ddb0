"""``python -m benchmarks.versions``."""

import sys

from benchmarks.lab.record import run
from benchmarks.versions.measure import main
from benchmarks.versions.table import TABLES

if __name__ == "__main__":
    statuses: list[int] = []
    run(lambda: statuses.append(main()), TABLES)
    sys.exit(max(statuses))
