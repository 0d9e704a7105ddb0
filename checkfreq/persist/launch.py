"""The command that starts the worker: the trainer's interpreter and packages, and nothing else.

``python -m`` would look for modules in the current directory first, which may be anybody's. The
worker is isolated instead (``-I``: the standard library and what is installed), and told where the
trainer found the few packages that it needs, so that it finds them too where they come from
``PYTHONPATH``, a zip archive or a source tree. Of those places it imports nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import xxhash

import checkfreq

#: The first line is what lists of processes show. The trainer's checkfreq comes before an installed
#: one, since both must be the same; any installed copy of the others will do.
_PROGRAM = """\
# checkfreq.persist.worker
import json, sys
from importlib.machinery import PathFinder

class Places:
    def __init__(self, places):
        self.places = places
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, [self.places[name]]) if name in self.places else None

places = json.loads(sys.argv[1])
sys.meta_path.insert(0, Places({"checkfreq": places.pop("checkfreq")}))
sys.meta_path.append(Places(places))
from checkfreq.persist.worker import main
main(sys.argv[2:])
"""


def worker_command(arguments: Sequence[object]) -> list[str]:
    """The worker's command line."""
    places = {module.__name__: _place_of(module) for module in (checkfreq, xxhash)}
    command = [sys.executable, *_isolation(), "-c", _PROGRAM, json.dumps(places)]
    return [*command, *map(str, arguments)]


def worker_environment() -> dict[str, str]:
    """The trainer's, without its devices and without what would make Python import other files."""
    kept = {name: value for name, value in os.environ.items() if name not in _IMPORTING}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


_IMPORTING = ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONINSPECT")


def _isolation() -> Sequence[str]:
    if "PYTHONHOME" in os.environ:  # -I forgets where the standard library is
        return ("-P", "-s")
    return ("-I",)


def _place_of(module: ModuleType) -> str:
    """The directory, or archive, in which a package was found."""
    assert module.__file__ is not None
    package = os.path.dirname(os.path.abspath(module.__file__))
    return os.path.dirname(package)
