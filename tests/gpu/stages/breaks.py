"""The deliberate breaks of the order of snapshots: a GPU test notices each.

Dry: one of them, on the fake device.
"""

from __future__ import annotations

import sys

from tests.gpu.stages.lines import say
from tests.mutations.__main__ import trials
from tests.mutations.breaks import BREAKS


def main() -> None:
    """Print a line per break. CUDA is not asked for a device here, or no fork could use it."""
    if "--dry" in sys.argv:
        found = trials([one for one in BREAKS if one.fake][:1], gpu=False, which="broken")
    else:
        found = trials([one for one in BREAKS if one.gpu is not None], gpu=True)
    for name, is_noticed, by in found:
        say(name, by=by, ok=is_noticed)


if __name__ == "__main__":
    main()
