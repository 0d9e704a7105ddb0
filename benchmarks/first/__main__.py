"""``python -m benchmarks.first``."""

from benchmarks.first.measure import main
from benchmarks.first.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
