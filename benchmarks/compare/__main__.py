"""``python -m benchmarks.compare``."""

from benchmarks.compare.measure import main
from benchmarks.compare.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
