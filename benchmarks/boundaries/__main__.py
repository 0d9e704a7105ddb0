"""``python -m benchmarks.boundaries``."""

from benchmarks.boundaries.measure import main
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main)
