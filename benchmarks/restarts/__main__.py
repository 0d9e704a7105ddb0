"""``python -m benchmarks.restarts``."""

from benchmarks.lab.record import run
from benchmarks.restarts.measure import main
from benchmarks.restarts.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
