"""``python -m benchmarks.iterators``."""

from benchmarks.iterators.measure import main
from benchmarks.iterators.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
