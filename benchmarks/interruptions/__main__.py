"""``python -m benchmarks.interruptions``."""

from benchmarks.interruptions.measure import main
from benchmarks.interruptions.table import TABLES
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main, TABLES)
