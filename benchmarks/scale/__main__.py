"""``python -m benchmarks.scale``."""

from benchmarks.lab.record import run
from benchmarks.scale.measure import main
from benchmarks.scale.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
