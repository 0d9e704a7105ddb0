"""Import this before transformers, which imports torchvision if it is installed."""

from __future__ import annotations

from checkfreq.examples.imagenet.models import import_torchvision

import_torchvision()
