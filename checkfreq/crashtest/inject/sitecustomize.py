"""Imported by each Python that a crash test starts: installs the hooks behind torch's import.

Scripts need no change for it. The environment's own ``sitecustomize`` is run first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class AfterTorch(MetaPathFinder):
    """Finds torch as Python would, and has it install the hooks when its import ends."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_install(module: ModuleType) -> None:
            run(module)
            with contextlib.suppress(ImportError):  # an environment without checkfreq
                from checkfreq.crashtest.hooks import install

                install()

        spec.loader.exec_module = run_and_install  # type: ignore[method-assign]
        return spec


def _run_the_other() -> None:
    """Run the ``sitecustomize`` that ours hides."""
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    sys.path[:] = others
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, AfterTorch())
    _run_the_other()
