"""Importing Lightning imports torchvision, whose wheel needs help under a CPU-only torch."""

from checkfreq.examples.imagenet.models import import_torchvision

import_torchvision()
