"""``python -m benchmarks.simulate``."""

from benchmarks.lab.record import run
from benchmarks.simulate.measure import main
from benchmarks.simulate.table import TABLES

if __name__ == "__main__":
    run(main, TABLES)
