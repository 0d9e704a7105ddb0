"""The page to send with a bug report: Markdown, without credentials, names and addresses. Pure.

What is on it is what was found; everything that names a person, a machine or a place is replaced.
The environment is not on it but for the variables that `checkfreq.doctor.machine` lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from checkfreq.doctor.findings import Section, Status
from checkfreq.errors import printable
from checkfreq.mirror.settings import scrub

_ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b(?!\.)")
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b")
_URL = re.compile(r"\b(s3a?|gs|az|adl|azure|abfss?|file)://[^\s'\"),;]+")
#: Names that name nobody, or are too short to be told from words.
_NOBODY = {"root", "user", "ubuntu", "nobody", "localhost"}
_LEAST_NAME = 3
_HEAD = """\
# checkfreq doctor

Written by `checkfreq doctor --page`. Names of users, machines, places and credentials are replaced;
please read it before you send it.
"""


def page(sections: Iterable[Section], *, hide: Mapping[str, str]) -> str:
    """The page. ``hide``: what to write for each text, the longest first."""
    lines = [_HEAD]
    for section in sections:
        lines += [f"## {section.name}", "", "| | | |", "|---|---|---|"]
        for one in section.findings:
            cells = (one.status.value, one.name, one.found)
            lines.append("| " + " | ".join(_cell(cell, hide) for cell in cells) + " |")
            if one.mend and one.status in (Status.WARNING, Status.PROBLEM):
                lines.append(f"| | | {_cell(one.means, hide)} |")
        lines.append("")
    return "\n".join(lines)


def hidden(
    *, directory: str, url: str, home: str, user: str, hosts: Sequence[str]
) -> dict[str, str]:
    """What is replaced on a page, and by what.

    Errors of an object store name the bucket and the prefix of ``url`` in addresses of their own.
    """
    bucket, _, prefix = url.partition("://")[2].strip("/").partition("/")
    found = {directory: "DIR", url: "URL", home: "~", bucket: "BUCKET"}
    found |= {prefix: "PREFIX", quote(prefix, safe=""): "PREFIX"}
    found |= {name: "HOST" for host in hosts for name in (host, host.partition(".")[0])}
    found[user] = "USER"
    return {
        text: by
        for text, by in found.items()
        if len(text) >= _LEAST_NAME and text.lower() not in _NOBODY
    }


def hide_in(text: str, hide: Mapping[str, str]) -> str:
    """``text`` without credentials, and without what ``hide`` names."""
    text = scrub(text)
    for one in sorted(hide, key=len, reverse=True):
        # Whole words: a user named "ann" must not change "cannot".
        text = re.sub(rf"(?<![\w-]){re.escape(one)}(?![\w-])", hide[one], text)
    return _ADDRESS.sub("x.x.x.x", _MAIL.sub("MAIL", _URL.sub(r"\1://…", text)))


def _cell(text: str, hide: Mapping[str, str]) -> str:
    return printable(hide_in(text, hide)).replace("|", "\\|")
