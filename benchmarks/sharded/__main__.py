"""``python -m benchmarks.sharded``."""

from benchmarks.lab.record import run
from benchmarks.sharded.measure import main
from benchmarks.sharded.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
