"""``python -m benchmarks.memory``."""

from benchmarks.lab.record import run
from benchmarks.memory.measure import main
from benchmarks.memory.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
