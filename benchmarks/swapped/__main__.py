"""``python -m benchmarks.swapped``."""

from benchmarks.lab.record import run
from benchmarks.swapped.measure import main
from benchmarks.swapped.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
