"""Run every snippet of a Markdown page: ``python -m tests.docs.page PAGE``, in an empty folder.

``python`` fences, and set-up code in ``<!-- setup ... -->`` comments, run in page order in one
namespace. A fence whose first line is ``# NAME.py`` is that file instead, and is written. The
``$ command`` lines of ``console`` fences run with bash in the same folder, in page order too; they
must exit with 0, or with N where the line ends with ``# exits N``. A command continues after a
backslash at the end of its line. Lines without ``$`` are output, which the command must print, with
any numbers, and this folder for /home/you; not compared are lines of our log, and those of a fence
that leaves some out (…).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_SNIPPET = re.compile(
    r"^(?P<indent> *)```(?P<language>python|console)\n(?P<code>.*?)^ *```$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(
    r"^\$ (?P<command>(?:.*\\\n)*.*)$\n?(?P<shown>(?:^(?!\$ ).*\n)*)", re.MULTILINE
)
_FILE = re.compile(r"# (\w+\.py)\n")
_EXITS = re.compile(r"# exits (\d+)$")
_NUMBER = re.compile(r"(\d[\d.,:]*)")


@dataclass(frozen=True, slots=True)
class Snippet:
    """Code of a page; ``line`` is where it begins, counted from 0."""

    language: str
    code: str
    line: int


def snippets_of(text: str) -> Iterator[Snippet]:
    """What is to run, in page order."""
    for found in _SNIPPET.finditer(text):
        group = "setup" if found["code"] is None else "code"
        line = text.count("\n", 0, found.start(group))
        yield Snippet(found["language"] or "python", textwrap.dedent(found[group]), line)


def run_page(page: Path) -> None:
    """Run the page's snippets here, in the current folder, as one program."""
    program = ModuleType("__main__")
    # Loader workers and pickle look up the classes of a snippet in the main module.
    sys.modules["__main__"] = program
    for snippet in snippets_of(page.read_text()):
        if snippet.language == "console":
            _run_commands(snippet, page)
        elif file := _FILE.match(snippet.code):
            Path(file[1]).write_text(snippet.code)
        else:
            # The page is the file that tracebacks name, with the page's line numbers.
            source = "\n" * snippet.line + snippet.code
            code = compile(source, str(page), "exec", dont_inherit=True)
            exec(code, program.__dict__)


def _run_commands(snippet: Snippet, page: Path) -> None:
    for found in _COMMAND.finditer(snippet.code):
        command = found["command"]
        exits = _EXITS.search(command)
        expected = int(exits[1]) if exits else 0
        print(f"$ {command}", flush=True)
        line = snippet.line + snippet.code.count("\n", 0, found.start()) + 1
        with tempfile.TemporaryFile("w+") as output:  # a pipe would wait for workers in background
            status = subprocess.run(
                ["bash", "-c", command], stdout=output, stderr=subprocess.STDOUT
            ).returncode
            output.seek(0)
            said = output.read()
        print(said, flush=True)
        if status != expected:
            sys.exit(f"{page}:{line}: `{command}` exited with {status}, not {expected}")
        if "…" not in snippet.code and (missing := _missing(found["shown"], said)):
            sys.exit(f"{page}:{line}: `{command}` did not print: {missing}")


def _missing(shown: str, said: str) -> str | None:
    """The first line that is shown and was not said, or not in this order."""
    lines = iter(said.splitlines())
    for line in shown.replace("/home/you", os.getcwd()).splitlines():
        words = (
            "".join(r"[\d.,:]+" if _NUMBER.match(part) else re.escape(part) for part in parts)
            for parts in map(_NUMBER.split, line.split())
        )
        pattern = re.compile(r"\s*" + r"\s+".join(words) + r"\s*")
        if not line.startswith("checkfreq: ") and not any(map(pattern.fullmatch, lines)):
            return line
    return None


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
