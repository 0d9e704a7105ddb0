"""The command line, without a process of its own for each call."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from typing import Any

from checkfreq.cli import main

#: What a call prints is redirected for the whole process.
_ONE_CALL_AT_A_TIME = threading.Lock()


def checkfreq(*arguments: object, status: int | None = None) -> list[dict[str, Any]]:
    """The JSON lines of ``checkfreq VERB ... --json``; asserts the exit status, if one is given."""
    said = io.StringIO()
    with _ONE_CALL_AT_A_TIME, contextlib.redirect_stdout(said):
        found = main([*map(str, arguments), "--json"])
    assert status in (None, found), said.getvalue()
    return [json.loads(line) for line in said.getvalue().splitlines()]
