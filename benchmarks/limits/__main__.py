"""``python -m benchmarks.limits``."""

from benchmarks.lab.record import run
from benchmarks.limits.measure import main
from benchmarks.limits.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
