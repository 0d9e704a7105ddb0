"""``python -m benchmarks.ranks``."""

from benchmarks.lab.record import run
from benchmarks.ranks.measure import main
from benchmarks.ranks.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
