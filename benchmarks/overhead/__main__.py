"""``python -m benchmarks.overhead``."""

from benchmarks.lab.record import run
from benchmarks.overhead.measure import main
from benchmarks.overhead.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
