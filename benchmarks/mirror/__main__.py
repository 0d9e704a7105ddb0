"""``python -m benchmarks.mirror``."""

from benchmarks.lab.record import run
from benchmarks.mirror.measure import main
from benchmarks.mirror.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
