"""``python -m benchmarks.frequency``."""

from benchmarks.frequency.measure import main
from benchmarks.frequency.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
