"""``python -m benchmarks.endurance``."""

from benchmarks.endurance.measure import main
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main)
