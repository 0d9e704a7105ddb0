"""``python -m benchmarks.decision``."""

from benchmarks.decision.measure import main
from benchmarks.decision.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
