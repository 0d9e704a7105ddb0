"""``python -m benchmarks.frozen``."""

from benchmarks.frozen.measure import main
from benchmarks.frozen.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
