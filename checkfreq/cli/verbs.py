"""The verbs of ``checkfreq``: the module that each is in, and its purpose.

A verb is one module with ``command``, a ``click.Command``. The module is imported when the verb is
used, so that ``checkfreq ls`` starts as fast as if there were no others; what a verb needs beside
it is a package of its own, imported inside the function.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

#: Set by a shell when it asks for completions (`checkfreq.cli.completion`).
COMPLETE_VARIABLE = "_CHECKFREQ_COMPLETE"


class Group(enum.Enum):
    """The heading under which ``checkfreq --help`` lists a verb."""

    LOOK = "Look at checkpoints (safe beside a run)"
    CHANGE = "Change a directory (refused beside a run)"
    FORMATS = "Files of other libraries"
    RUN = "Run and plan a training"
    SHELL = "The command line itself"


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb is, what it is for (a phrase in lower case), and its heading."""

    module: str
    purpose: str
    group: Group = Group.LOOK


VERBS: Mapping[str, Verb] = {
    "ls": Verb("checkfreq.cli.ls", "list the checkpoints, oldest first"),
    "show": Verb("checkfreq.cli.show", "show what a checkpoint holds"),
    "verify": Verb("checkfreq.cli.verify", "read every byte and check every digest"),
    "diff": Verb("checkfreq.cli.diff", "show how two checkpoints differ"),
    "report": Verb(
        "checkfreq.cli.report", "tell what happened in a directory, as a page with charts"
    ),
    "watch": Verb("checkfreq.cli.watch", "show how a run is doing now, and serve it to Prometheus"),
    "log": Verb("checkfreq.cli.log", "tell what was saved, lost and restored, run by run"),
    "pin": Verb("checkfreq.cli.pin", "keep checkpoints, whatever retention says", Group.CHANGE),
    "unpin": Verb("checkfreq.cli.unpin", "leave checkpoints to retention again", Group.CHANGE),
    "prune": Verb(
        "checkfreq.cli.prune", "remove the checkpoints that are not to be kept", Group.CHANGE
    ),
    "quarantine": Verb(
        "checkfreq.cli.quarantine",
        "set a checkpoint aside, so that no restore takes it",
        Group.CHANGE,
    ),
    "export": Verb(
        "checkfreq.cli.export", "write a checkpoint as files of another library", Group.FORMATS
    ),
    "import": Verb(
        "checkfreq.cli.import_", "make files of another library a checkpoint", Group.FORMATS
    ),
    "convert": Verb(
        "checkfreq.cli.convert", "export or import, as the names ask for", Group.FORMATS
    ),
    "run": Verb(
        "checkfreq.cli.run",
        "run a training, and start it again after a crash or a kill",
        Group.RUN,
    ),
    "crashtest": Verb(
        "checkfreq.cli.crashtest", "find out whether a training script resumes exactly", Group.RUN
    ),
    "simulate": Verb(
        "checkfreq.cli.simulate",
        "simulate a training run with failures, for several ways to choose the interval",
        Group.RUN,
    ),
    "plan": Verb(
        "checkfreq.cli.plan",
        "plan the interval, its overhead, loss, bytes and cost, and goodput by size",
        Group.RUN,
    ),
    "doctor": Verb(
        "checkfreq.cli.doctor", "say what this machine gives a run, and how to mend it", Group.RUN
    ),
    "completion": Verb(
        "checkfreq.cli.completion", "print a script for completion in a shell", Group.SHELL
    ),
}
