"""``python -m benchmarks.traces``."""

from benchmarks.lab.record import run
from benchmarks.traces.measure import main
from benchmarks.traces.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
