"""``python -m checkfreq.cli``, where the console script is not installed."""

import sys

from checkfreq.cli import main

if __name__ == "__main__":
    sys.exit(main())
