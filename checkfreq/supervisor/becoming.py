"""Runs in a standby: imports what a training imports, waits for its turn, becomes the script.

Until its turn it runs nothing of the script, reads nothing of its directory and takes no signal. It
ends when the supervisor does, whose end of the socket is then closed. Where a start from here could
differ from one by a new interpreter, it becomes that instead, by ``exec``.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader, all_suffixes
from types import CodeType, TracebackType
from typing import Any

from checkfreq.supervisor.processes import RESTORED
from checkfreq.supervisor.signals import FINAL, PASSED

#: What trainings import sooner or later; the first optimizer imports ``torch._dynamo``. Importing
#: these starts nothing on a device and draws no random numbers.
USUAL = (
    *("numpy", "torch", "torch.optim", "torch._dynamo", "torch.utils.data", "torch.distributed"),
    *("checkfreq.manager", "iterators.cf_iterator", "iterators.torch.loader"),
)
_MESSAGE_BYTES = 1 << 16
_SIGNALS = FINAL | PASSED
_OF_JOB_CONTROL = frozenset({signal.SIGTSTP, signal.SIGCONT})


@dataclass(frozen=True, slots=True)
class Turn:
    """What a standby is for; its fields come as JSON. ``fd`` is its end of the socket.

    ``mask``: the signals that the script begins with blocked. ``more``: modules to import besides.
    """

    fd: int
    command: list[str]
    is_module: bool
    name: str
    arguments: list[str]
    mask: list[int]
    more: list[str]


def main(text: str) -> None:
    """The life of a standby."""
    turn = Turn(**json.loads(text))
    environ = dict(os.environ)  # imports may change it
    supervisor = socket.socket(fileno=turn.fd)
    handlers = _ignore_signals()
    is_due = partial(_is_readable, supervisor)
    _import(USUAL, unless=is_due, say=lambda name, error: None)
    _import(turn.more, unless=is_due, say=_say)
    given = _wait(supervisor)
    os.environ.update(given)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    supervisor.sendall(b"\n")  # from here on the signals are the script's
    supervisor.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, turn.mask)
    run = _run_of(turn)
    if run is None:
        for number in RESTORED:
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(turn.command[0], turn.command, environ | given)
    _become(turn, run)


# ---- before its turn


def _ignore_signals() -> dict[int, Any]:
    """Ignore what a terminal or a scheduler sends to all; returns what was done with it before."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS - _OF_JOB_CONTROL
    }
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # what came before is dropped
    return {number: handler for number, handler in before.items() if handler is not None}


def _import(
    names: Iterable[str], *, unless: Callable[[], bool], say: Callable[[str, Exception], None]
) -> None:
    """Import modules, until it is time to start: what is left may not be needed."""
    for name in names:
        if unless():
            return
        try:
            importlib.import_module(name)
        except Exception as error:  # the script will see what it makes of it
            say(name, error)


def _is_readable(supervisor: socket.socket) -> bool:
    return bool(select.select([supervisor], (), (), 0)[0])


def _say(name: str, error: Exception) -> None:
    line = f"checkfreq run: the standby cannot import {name}: {type(error).__name__}: {error}\n"
    os.write(2, line.encode())


def _wait(supervisor: socket.socket) -> dict[str, str]:
    """Variables for the environment, once it is time to start; no return if that never comes."""
    message = b""
    while not message.endswith(b"\n"):
        got = supervisor.recv(_MESSAGE_BYTES)
        if not got:
            os._exit(0)
        message += got
    given: dict[str, str] = json.loads(message)
    return given


# ---- its turn


def _run_of(turn: Turn) -> Callable[[], object] | None:
    """What runs the script; None if only a new interpreter does it right."""
    first = os.getcwd() if turn.is_module else os.path.dirname(os.path.realpath(turn.name))
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # Python 3.10 has no -P
        if _hides_a_module(first):
            return None
        sys.path.insert(0, first)
    importlib.invalidate_caches()
    if turn.is_module:
        return lambda: _run_module(turn.name)
    path = os.path.abspath(turn.name)
    code = _code_of(path)
    return None if code is None else lambda: exec(code, _fresh_main(path))


def _run_module(name: str) -> None:
    _fresh_main(None)
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what the interpreter calls


def _hides_a_module(folder: str) -> bool:
    """Whether a new interpreter would have imported one of the modules that we have from there."""
    try:
        names = os.listdir(folder)
    except OSError:
        return True
    suffixes = sorted(all_suffixes(), key=len, reverse=True)
    for name in names:
        suffix = next((one for one in suffixes if name.endswith(one)), None)
        module = sys.modules.get(name if suffix is None else name.removesuffix(suffix))
        file = getattr(module, "__file__", None)
        is_package = suffix is None and os.path.exists(os.path.join(folder, name, "__init__.py"))
        if file is None or not (suffix or is_package):
            continue
        if os.path.dirname(os.path.dirname(file) if is_package else file) != folder:
            return True
    return False


def _code_of(path: str) -> CodeType | None:
    """The script as it is now; None for what is no text of a program, and for errors in it."""
    if pkgutil.get_importer(path) is not None:  # a folder or an archive
        return None
    try:
        with io.open_code(path) as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return None


def _fresh_main(path: str | None) -> dict[str, Any]:
    """The namespace of ``__main__``, as a new interpreter has it for a script."""
    namespace = sys.modules["__main__"].__dict__
    builtins = namespace["__builtins__"]
    namespace.clear()
    namespace.update(
        __name__="__main__",
        __doc__=None,
        __package__=None,
        __loader__=None if path is None else SourceFileLoader("__main__", path),
        __spec__=None,
        __annotations__={},
        __builtins__=builtins,
    )
    if path is not None:
        namespace.update(__file__=path, __cached__=None)
    return namespace


def _become(turn: Turn, run: Callable[[], object]) -> None:
    """Run it. What it raises is shown without our frames, as if we had not been."""
    sys.orig_argv[:] = turn.command
    sys.argv[:] = ["-m" if turn.is_module else turn.name, *turn.arguments]
    try:
        run()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = _without_ours(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
