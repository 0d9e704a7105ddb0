"""``report``, ``watch``, ``log``, ``plan`` and ``diff``, as one types them, on directories that are
closed, torn, of a later version, or made by somebody who wants to do harm.

Each ends with an exit status of its own and a sentence, never with a traceback, and nothing that a
directory holds controls the terminal or becomes a part of a page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq.cli import main
from checkfreq.pacing.profile_cache import ProfileCache
from checkfreq.store.manifest import digest_of
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes
from tests.cli.test_plan import MEASURED
from tests.hostile import grammar
from tests.story.made import START_S, event, two_runs, write

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "<script>alert(1)</script>\x1b[2J\x9b\x7f\r\u202e\ud800&amp;" + "x" * 5000
#: The words after ``checkfreq``; a directory takes the place of DIR.
COMMANDS = {
    "report": ["report", "DIR", "--out", "page.html"],
    "report --json": ["report", "DIR", "--json"],
    "watch": ["watch", "--once", "DIR"],
    "watch --json": ["watch", "--once", "--json", "DIR"],
    "watch --textfile": ["watch", "--once", "--textfile", "checkfreq.prom", "DIR"],
    "log": ["log", "--all", "DIR"],
    "log --json": ["log", "--json", "DIR"],
    "plan": ["plan", "DIR"],
    "plan --json": ["plan", "--json", "DIR"],
    "diff": ["diff", "DIR"],
    "diff --json": ["diff", "--json", "DIR"],
}
EVENTS = [name for name in COMMANDS if not name.startswith("diff")]

Capture = pytest.CaptureFixture[str]
#: The exit status, what was printed, and what was said beside it.
Done = tuple[int, str, str]
Checkfreq = Callable[[str, Path | str], Done]


def words_of(command: str, chk_dir: Path | str) -> list[str]:
    return [str(chk_dir) if word == "DIR" else word for word in COMMANDS[command]]


@pytest.fixture
def checkfreq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Checkfreq:
    """Runs one of COMMANDS in ``tmp_path``, in this process."""
    monkeypatch.chdir(tmp_path)

    def checkfreq(command: str, chk_dir: Path | str) -> Done:
        status = main(words_of(command, chk_dir))
        return status, *capsys.readouterr()

    return checkfreq


def made(chk_dir: Path) -> Path:
    """Two checkpoints that differ, the events of two runs, and measured costs."""
    store = CheckpointStore(chk_dir)
    store.open()
    for step in (1, 2):
        commit_bytes(store, step, {"m": b"abc"})
        folder = store.path(step)
        manifest = grammar.read_manifest(folder)
        manifest["objects"] = {"extra": {"epoch": step}}
        grammar.write_manifest(folder, manifest)
    ProfileCache(chk_dir / "profile.json").store({"cpu": "some"}, MEASURED)
    write(chk_dir, two_runs())
    return chk_dir


@pytest.fixture
def chk_dir(tmp_path: Path) -> Path:
    return made(tmp_path / "chk")


def is_controlled(text: str) -> bool:
    """Whether a terminal that is shown it would be controlled."""
    return re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text) is not None


# ---- no permission

_AS_NOBODY = """
import contextlib, io, json, os, sys
import encodings.idna, zoneinfo
from checkfreq.cli import group, main
from checkfreq.cli import comparing, diff, log, ls, pin, plan, prune, report, show, verify, watch
import checkfreq.story.facts, checkfreq.story.live, checkfreq.story.report.writing
import checkfreq.story.watch.prometheus, checkfreq.story.watch.terminal
os.setuid(65534)
told = {}
for name, words in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    told[name] = [status, out.getvalue(), err.getvalue()]
print(json.dumps(told))
"""


def as_nobody(commands: dict[str, list[str]], cwd: Path) -> dict[str, Done]:
    """What each command says to another user, whom root's permissions do not help."""
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr == ""
    return {name: tuple(told) for name, told in json.loads(done.stdout).items()}


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that others may enter: pytest's own are closed to them."""
    if os.geteuid() != 0:
        pytest.skip("being another user needs root")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("what", ["directory", "files"])
def test_without_permission_it_is_said_in_a_line(what: str, public: Path) -> None:
    chk_dir = made(public / "chk")
    commands = {name: words_of(name, chk_dir) for name in COMMANDS}
    if what == "directory":
        chk_dir.chmod(0o700)
        commands |= {verb: [verb, str(chk_dir)] for verb in ("ls", "show", "verify", "prune")}
        commands["pin"] = ["pin", str(chk_dir), "1"]
    else:
        for path in [path for path in chk_dir.rglob("*") if path.is_file()]:
            path.chmod(0o600)
    for name, (status, out, error) in as_nobody(commands, public).items():
        assert (name, status, out, error.count("\n")) == (name, 2, "", 1)
        assert error.startswith("checkfreq: ")
        assert "Permission denied" in error
    assert not {"page.html", "checkfreq.prom"} & {*os.listdir(public)}


# ---- later versions


def test_a_checkpoint_of_a_newer_format_is_no_difference(
    chk_dir: Path, checkfreq: Checkfreq
) -> None:
    path = chk_dir / "step-00000002" / "manifest.json"
    data = path.read_bytes()
    digest = data.split(b'"digest": "')[1][:16]
    version = re.search(rb'"format_version": (\d+)', data)
    assert version is not None
    later = data.replace(version[0], b'"format_version": 99', 1).replace(digest, b"0" * 16, 1)
    path.write_bytes(later.replace(b"0" * 16, digest_of(later).encode(), 1))
    status, out, error = checkfreq("diff", chk_dir)
    assert (status, out) == (2, "")
    assert "format version 99" in error
    assert "newer checkfreq" in error


@pytest.mark.parametrize("command", EVENTS)
def test_of_events_of_a_newer_version_is_told_what_is_known(
    command: str, chk_dir: Path, checkfreq: Checkfreq
) -> None:
    newer = {"costs": {"of": "another kind"}, "num_bytes": {"compressed": 1}, "is_new": True}
    events = [
        event("discovered", 0, START_S, what="a kind of a later version"),
        *(
            {**one, **(newer if one["kind"] == "committed" else {"more": [1]})}
            for one in two_runs()
        ),
        event("transmuted", 170, START_S + 125, what={"deep": [1, 2]}),
    ]
    write(chk_dir, events)
    status, out, error = checkfreq(command, chk_dir)
    assert (status, error) == (0, "")
    if command.startswith("log"):
        assert "transmuted" in out
    if command.startswith("watch") and "textfile" not in command:
        assert "160" in out


# ---- torn files

_GOOD = "".join(f"{json.dumps(one)}\n" for one in two_runs()).encode()
TORN = {
    "cut": _GOOD[:-40],
    "cut in a letter": _GOOD + '{"kind": "committed", "step": 200, "reason": "é'.encode()[:-1],
    "zeros within": _GOOD[:700] + b"\0" * 512 + _GOOD[1212:],
    "no JSON": b"\xff\xfe\x00" * 400 + b"\n" + _GOOD,
    "deep": b"[" * 100_000 + b"\n" + _GOOD,
    "a long line": b"x" * 3_000_000 + b"\n" + _GOOD,
    "numbers that are none": b'{"kind": "plan", "step": 1, "time_unix_s": NaN}\n'
    b'{"kind": "plan", "step": 1, "time_unix_s": 1.0, "iteration_s": 1e999}\n' + _GOOD,
    "surrogates": b'{"kind": "\\ud800", "step": 1, "time_unix_s": 1.0}\n' + _GOOD,
}


@pytest.mark.parametrize("command", EVENTS)
def test_of_torn_events_the_rest_is_told(command: str, chk_dir: Path, checkfreq: Checkfreq) -> None:
    drawn = ("cut", "numbers that are none", "surrogates")  # charts take their time
    for name in drawn if command == "report" else TORN:
        (chk_dir / "events.jsonl").write_bytes(TORN[name])
        status, _, error = checkfreq(command, chk_dir)
        assert (name, status, error) == (name, 0, "")


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "device"])
@pytest.mark.parametrize("command", EVENTS)
def test_what_is_no_file_is_refused_and_waited_for_by_nobody(
    command: str, kind: str, chk_dir: Path, checkfreq: Checkfreq
) -> None:
    path = chk_dir / "events.jsonl"
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to("/etc/passwd")
        case _:
            path.symlink_to("/dev/zero")
    status, out, error = checkfreq(command, chk_dir)
    assert status == 2
    (line,) = error.splitlines()
    assert line.startswith("checkfreq: ")
    assert "events.jsonl" in line
    assert "root:" not in out


@pytest.mark.parametrize("command", [name for name in EVENTS if not name.startswith("plan")])
def test_a_directory_of_somebody_else_is_named_with_what_was_expected(
    command: str, tmp_path: Path, checkfreq: Checkfreq
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"\xff\xd8")
    status, _, error = checkfreq(command, "photos")
    assert status == 1
    (line,) = error.splitlines()
    assert "photos: expected a checkpoint directory with events.jsonl, found none" in line


# ---- hostile names


def hostile_events() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for one in two_runs():
        texts = {name: HOSTILE for name, value in one.items() if isinstance(value, str)}
        found.append({**one, **texts, "kind": one["kind"], HOSTILE: HOSTILE, "reason": HOSTILE})
    last_s = START_S + 130
    return [
        *found,
        event("failed", 200, last_s, error=HOSTILE, steps_at_risk=40),
        event(HOSTILE, 200, last_s, text=HOSTILE),
        event("ended", 200, last_s, how=HOSTILE),
    ]


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    """A directory whose name, events and state are hostile; relative to ``tmp_path``."""
    name = "<img src=x onerror=alert(1)>\x1b]0;owned\x07" + "y" * 150
    chk_dir = made(tmp_path / name)
    write(chk_dir, hostile_events())
    for step in (1, 2):
        folder = chk_dir / f"step-{step:08d}"
        found = grammar.read_manifest(folder)
        found["objects"] = {HOSTILE: {HOSTILE: f"{HOSTILE} {step}"}}
        found["files"][0]["tensors"][0]["name"] = f"{HOSTILE[:300]} {step}"
        grammar.write_manifest(folder, found)
    return name


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_that_a_directory_holds_controls_the_terminal(
    command: str, hostile: str, checkfreq: Checkfreq
) -> None:
    status, out, error = checkfreq(command, hostile)
    assert status == (1 if "diff" in command else 0), error
    assert not is_controlled(out)
    assert not is_controlled(error)
    if command in ("watch --json", "log --json"):
        for line in out.splitlines():
            json.loads(line)


def test_the_page_holds_hostile_text_as_text(
    hostile: str, tmp_path: Path, checkfreq: Checkfreq
) -> None:
    assert checkfreq("report", hostile)[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "<script" not in page
    assert "<img" not in page
    assert not is_controlled(page.replace("\n", ""))
    assert len(page) < 2_000_000


def test_a_metric_of_a_hostile_directory_is_one_line(
    hostile: str, tmp_path: Path, checkfreq: Checkfreq
) -> None:
    assert checkfreq("watch --textfile", hostile)[0] == 0
    lines = (tmp_path / "checkfreq.prom").read_text().splitlines()
    assert all(
        re.match(r'# (HELP|TYPE) checkfreq_|checkfreq_\w+\{dir=".*\} \S+$', x) for x in lines
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_is_too_long_is_an_error(command: str, checkfreq: Checkfreq) -> None:
    status, _, error = checkfreq(command, "\x1b[2J" + "n" * 5000)
    assert status in (1, 2)
    assert not is_controlled(error)
    (line,) = error.splitlines()
    assert line.startswith("checkfreq: ")
