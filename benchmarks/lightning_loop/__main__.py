"""``python -m benchmarks.lightning_loop``."""

from benchmarks.lab.record import run
from benchmarks.lightning_loop.measure import main
from benchmarks.lightning_loop.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
