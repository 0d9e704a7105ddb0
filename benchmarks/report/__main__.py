"""``python -m benchmarks.report``."""

from benchmarks.lab.record import run
from benchmarks.report.measure import main
from benchmarks.report.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
