"""``python -m checkfreq.cli``, where the console script is not installed."""

import sys

from checkfreq.cli import main

sys.exit(main())
