"""``python -m benchmarks.crashtest``."""

from benchmarks.crashtest.measure import main
from benchmarks.crashtest.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
