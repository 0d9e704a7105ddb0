"""A trainer that never ends, whatever its flags: ``python -m tests.benchmarks.endless``."""

import signal

if __name__ == "__main__":
    signal.pause()
