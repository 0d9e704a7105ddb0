"""``python -m benchmarks.paper``."""

from benchmarks.lab.record import run
from benchmarks.paper.measure import main
from benchmarks.paper.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
