"""``python -m benchmarks.device``."""

from benchmarks.device.measure import main
from benchmarks.lab.record import run

if __name__ == "__main__":
    run(main)
