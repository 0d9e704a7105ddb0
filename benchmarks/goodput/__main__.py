"""``python -m benchmarks.goodput``."""

from benchmarks.goodput.measure import main
from benchmarks.goodput.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
