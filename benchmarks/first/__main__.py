"""``python -m benchmarks.first``."""

from benchmarks.first.measure import main
from benchmarks.lab.record import run
from benchmarks.overhead.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
