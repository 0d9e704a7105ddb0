"""``python -m benchmarks.lightning_loop``."""

from benchmarks.lab.record import run
from benchmarks.lightning_loop.measure import main

if __name__ == "__main__":
    run(main)
