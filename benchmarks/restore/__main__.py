"""``python -m benchmarks.restore``."""

from benchmarks.lab.record import run
from benchmarks.restore.measure import main
from benchmarks.restore.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
