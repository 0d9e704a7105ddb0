"""A trainer with a child that never ends, both writers of the FIFO that is the first argument."""

import os
import signal
import sys

if __name__ == "__main__":
    fifo = os.open(sys.argv[1], os.O_WRONLY)
    if not os.fork():
        os.write(fifo, b"x")
    signal.pause()
