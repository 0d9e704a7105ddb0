"""``python -m benchmarks.interval``."""

from benchmarks.interval.measure import main
from benchmarks.interval.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
