"""``python -m benchmarks.decision``."""

from benchmarks.decision.measure import main
from benchmarks.lab.record import run
from benchmarks.overhead.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
