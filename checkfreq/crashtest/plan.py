"""What the crash test tells the training process, in a file that an environment variable names.

The variable holds a folder, that of one *life*: one start of the script. In it lies the plan, and
the recorder writes there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkfreq.errors import ConfigError

VARIABLE = "CHECKFREQ_CRASHTEST"
#: In the folder of a life once the signal was sent that was to end it.
SENT = "sent"
#: In a record, what the names of the user's variables begin with; all else there is state.
VARIABLES = "variable "
_FILE = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One life. Steps are boundaries since training began; -1 stands for none.

    ``home``: the folder in which every checkpoint directory of the run is put. ``saves``: take a
    checkpoint there, and wait until it is durable; ``tries``: take one, and do not wait.
    ``hold_at``: wait there for the kill, so that a short run is not over before it. ``die_at``:
    SIGKILL to oneself there. ``tear_at``: from there on, die in the write that makes a file larger
    than ``tear_bytes``. ``files``, ``pattern``: the folder and the files of a script that saves by
    itself. ``steps``: of such a script, the step of the uninterrupted run by a digest of the
    parameters after it. ``reads``: the state is read there even if it is large. ``hash_seed``: of
    Python's hashes, on which the order of sets depends; another one in each life, as starts have.
    """

    home: str
    saves: tuple[int, ...] = ()
    tries: tuple[int, ...] = ()
    hold_at: int = -1
    die_at: int = -1
    tear_at: int = -1
    tear_bytes: int = 0
    files: str = ""
    pattern: str = ""
    steps: Mapping[str, int] = field(default_factory=dict)
    reads: tuple[int, ...] = ()
    hash_seed: int = 0

    def write(self, folder: Path) -> None:
        """Leave it in the folder of a life."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))


def plan_in(folder: str) -> Plan:
    """The plan of a life. Raises ConfigError if the variable names no such folder."""
    try:
        values: dict[str, Any] = json.loads((Path(folder) / _FILE).read_text())
        for name, value in values.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return Plan(**values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{VARIABLE}={folder!r}: expected the folder of a running `checkfreq crashtest`, found "
            f"{type(error).__name__}: {error}. The variable is set by that command alone: unset it"
        ) from None


def life_folder(environ: Mapping[str, str] = os.environ) -> str:
    """The folder of this process's life; "" outside of crash tests."""
    return environ.get(VARIABLE, "")


def started(pid: int) -> int:
    """When a process started, in ticks since the machine did; 0 if there is none.

    With it a process is told from a later one of the same number.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])
