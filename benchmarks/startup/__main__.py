"""``python -m benchmarks.startup``."""

from benchmarks.lab.record import run
from benchmarks.startup.measure import main
from benchmarks.startup.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
