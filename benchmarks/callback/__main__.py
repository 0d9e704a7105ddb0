"""``python -m benchmarks.callback``."""

from benchmarks.callback.measure import main
from benchmarks.callback.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
