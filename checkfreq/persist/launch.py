"""The command that starts the worker: the trainer's interpreter and packages, and nothing else.

``python -m`` would search the current directory for modules first, where anyone may have put
files. The worker runs isolated instead (``-I``: the standard library and installed packages), and
is told where the trainer found the few packages it needs, in case that is ``PYTHONPATH``, a zip
archive or a source tree. It imports nothing else from those locations.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import xxhash

import checkfreq

#: Process listings show the first line. The trainer's checkfreq comes before an installed one,
#: since trainer and worker must be of one version; any installed copy of the others will do.
_PROGRAM = """\
# checkfreq.persist.worker
import sys
sys.path[:] = filter(None, sys.path)  # the current directory: Python 3.10 has no -P
import json
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
    if (obstore := find_spec("obstore")) is not None and obstore.origin is not None:
        places["obstore"] = _place(obstore.origin)  # not imported: only a mirror needs it
    command = [sys.executable, *_isolation(), "-c", _PROGRAM, json.dumps(places)]
    return [*command, *map(str, arguments)]


def worker_environment() -> dict[str, str]:
    """The trainer's environment without its devices, and without what changes Python's imports."""
    kept = {name: value for name, value in os.environ.items() if name not in _IMPORTING}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


def own_umask() -> int | None:
    """This process's umask; None where the kernel does not show it.

    ``os.umask`` would have to change it, under other threads that make files.
    """
    found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return None if found is None else int(found[1], 8)


_IMPORTING = ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONINSPECT")


def _isolation() -> Sequence[str]:
    if "PYTHONHOME" in os.environ:  # -I ignores it, and would not find the standard library
        return ("-P", "-s") if sys.version_info >= (3, 11) else ("-s",)
    return ("-I",)


def _place_of(module: ModuleType) -> str:
    """The directory, or archive, in which a package was found."""
    assert module.__file__ is not None
    return _place(module.__file__)


def _place(file: str) -> str:
    package = os.path.dirname(os.path.abspath(file))
    return os.path.dirname(package)
