"""``python -m benchmarks.watch``."""

from benchmarks.lab.record import run
from benchmarks.watch.measure import main
from benchmarks.watch.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
