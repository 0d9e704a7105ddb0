"""``python -m benchmarks.node``."""

from benchmarks.lab.record import run
from benchmarks.node.measure import main
from benchmarks.node.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
