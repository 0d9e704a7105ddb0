"""What all verbs have in common: help, ``--json``, usage errors, completion, a light start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from checkfreq.cli import main
from checkfreq.cli.group import command as checkfreq
from checkfreq.cli.verbs import VERBS
from checkfreq.store.store import CheckpointStore

ROOT = Path(__file__).resolve().parents[2]
PLAN = "plan --iteration-s 0.5 --cost-s 0.5 --persist-s 8 --state-bytes 10G"

Write = Callable[[int], Path]
Capture = pytest.CaptureFixture[str]


def command_of(verb: str) -> click.Command:
    found = checkfreq.get_command(click.Context(checkfreq), verb)
    assert found is not None
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_json_and_explains_itself_with_an_example(
    verb: str, capsys: Capture
) -> None:
    command = command_of(verb)
    assert command.name == verb
    assert "--json" in {name for option in command.params for name in option.opts}
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: checkfreq {verb} ")
    example = text.partition("\n  Example")[2].partition(":\n")[2]
    assert example.strip().startswith(f"checkfreq {verb} ")
    options = [one for one in command.params if isinstance(one, click.Option)]
    assert [one.name for one in options if not (one.help or "").endswith(".")] == []


@pytest.mark.parametrize("argv", [["--help"], ["-h"]])
def test_the_help_lists_every_verb_and_imports_none(argv: list[str]) -> None:
    done = python(
        "import sys; from checkfreq.cli import main; from checkfreq.cli.verbs import VERBS\n"
        "status = main(sys.argv[1:])\n"
        "assert not {verb.module for verb in VERBS.values()} & {*sys.modules}; sys.exit(status)",
        *argv,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout


def python(program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["wacth", "chk"], "got 'wacth': did you mean watch?"),
        (["burn\x1b[2J"], "expected one of ls, show, verify, "),
        (["ls", "--nothing", "x"], "--nothing"),
        (["verify", "x", "1\x1b2"], r"expected a step such as 1200, got '1\x1b2'"),
        (["--nothing"], "--nothing"),
    ],
)
def test_wrong_usage_is_said_in_one_line_without_control_characters(
    argv: list[str], said: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage.startswith("Usage: checkfreq ")
    assert line.startswith("checkfreq: ")
    assert said in line
    assert line.isprintable()


def test_verbs_options_directories_and_steps_are_completed(
    write: Write, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def completed(words: str) -> list[str]:
        """The words that bash is offered for the last of ``words``."""
        monkeypatch.setenv("_CHECKFREQ_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert main([]) == 0
        return capsys.readouterr().out.split()

    for step in (5, 120, 130):
        write(step)
    assert completed("checkfreq ver") == ["plain,verify"]
    assert completed("checkfreq show --ten") == ["plain,--tensors"]
    assert completed("checkfreq show ch") == ["dir,ch"]
    assert completed(f"checkfreq show {store.root} 1") == ["plain,130", "plain,120"]
    assert completed(f"checkfreq show {store.root}/none 1") == []


@pytest.mark.parametrize(
    ("words", "status", "absent"),
    [
        ("verify DIR", 0, "torch numpy"),
        ("diff DIR 5 6", 1, "torch"),
        (PLAN, 0, "torch matplotlib numpy"),
    ],
    ids=["verify", "diff", "plan"],
)
def test_a_verb_imports_nothing_heavy_that_it_does_not_need(
    words: str, status: int, absent: str, write: Write, store: CheckpointStore
) -> None:
    for step in (5, 6):
        write(step)
    done = python(
        "import sys; from checkfreq.cli import main; status = main(sys.argv[2:])\n"
        "assert not {*sys.argv[1].split()} & {*sys.modules}; sys.exit(status)",
        absent,
        *words.replace("DIR", str(store.root)).split(),
    )
    assert (done.returncode, done.stderr) == (status, "")


def test_ctrl_c_ends_it_with_130_and_no_traceback(
    store: CheckpointStore, write: Write, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write(5)

    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "write", interrupted)
    assert main(["ls", str(store.root)]) == 130
    assert capsys.readouterr().err == "checkfreq: interrupted\n"


def test_run_passes_everything_after_two_dashes_untouched(tmp_path: Path) -> None:
    words = ["--", "--json", "-h", "--max-restarts", "*", "\udcff", "a b", ""]
    program = "import sys; open('words', 'w').write(ascii(sys.argv[1:]))"
    for dashes in (["--"], []):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(
            [sys.executable, "-m", "checkfreq.cli", "run", *dashes, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=60,
        )
        assert done.returncode == 0
        assert (tmp_path / "words").read_text() == ascii(words)
