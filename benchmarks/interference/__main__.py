"""``python -m benchmarks.interference``."""

from benchmarks.interference.measure import main
from benchmarks.interference.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
