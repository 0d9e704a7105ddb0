"""``checkfreq report``: the page, the JSON, and where neither is written."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from checkfreq.cli import main
from tests.cli.golden import compare
from tests.story.made import START_S, committed, event, two_runs, write

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.chdir(tmp_path)


def test_the_page_is_one_file_that_needs_no_other(tmp_path: Path, capsys: Capture) -> None:
    chk_dir = write(tmp_path / "chk", two_runs())
    assert main(["report", str(chk_dir)]) == 0
    assert capsys.readouterr().out == "report.html\n"
    page = (tmp_path / "report.html").read_text()
    assert "http" not in re.sub(r'http-equiv|xmlns[:a-z]*="[^"]*"', "", page)
    assert "<script" not in page
    assert "1 restart: about 61 iterations (41 to 81) done again." in page
    assert "Runs have failed" not in page  # the one that was killed lasted less than a minute
    assert "<b>about 15.7 s</b><span>work done again</span>" in page
    assert "<b>\u26a0 1</b><span>failed checkpoints</span>" in page
    for title in ("How far training is", "Overhead", "Runs", "What went wrong"):
        assert f"<h2>{title}</h2>" in page
    assert not re.search("#0102[0-9a-f]{2}", page)  # every colour is a variable
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len({*ids})


def test_a_page_to_be_sent_hides_the_place_and_explains_an_overhead_above_the_bound(
    tmp_path: Path,
) -> None:
    error = f"{tmp_path}/private/chk/step-1: no room; quota of {Path.home()}/models"
    above = {"costs": {"measured_overhead": 0.45, "iteration_s": 0.25}}
    events = [*two_runs(), event("failed", 9, START_S, error=error)]
    events.append({**committed(200, START_S + 130), **above})
    chk_dir = write(tmp_path / "private" / "chk", events)
    assert main(["report", str(chk_dir), "--out", "a.html"]) == 0
    page = Path("a.html").read_text()
    assert "<h1>chk</h1>" in page
    assert "chk/step-1: no room; quota of ~/models" in page
    assert "private" not in page
    assert "have added 45 %, above the 3.5 % that the bound allows" in page
    assert "<b>\u26a0 45 %</b><span>overhead, of 3.5 % allowed</span>" in page


def test_the_json_is_what_it_was(tmp_path: Path, capsys: Capture) -> None:
    ended = event("ended", 200, two_runs()[-1]["time_unix_s"] + 5, how="closed")
    chk_dir = write(tmp_path / "chk", [*two_runs(), ended])
    assert main(["report", "--json", str(chk_dir)]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("at_unix_s", "last_durable_age_s", "quiet_s"):
        assert found["now"].pop(name) > 0
    compare("report", found)


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    chk_dir = write(tmp_path / "chk", two_runs())
    assert main(["report", str(chk_dir), "--out", "none/a.html"]) == 2
    assert "report: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "report --png figures", "report --out a/b.html"])
def test_nothing_is_written_in_the_checkpoint_directory_that_one_works_in(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    chk_dir = write(tmp_path / "chk", two_runs())
    (chk_dir / "step-00000001" / "a").mkdir(parents=True)
    monkeypatch.chdir(chk_dir)
    before = sorted(chk_dir.rglob("*"))
    assert main([*command.split(), "."]) == 2
    assert f"is in {chk_dir}, a checkpoint directory" in capsys.readouterr().err
    assert sorted(chk_dir.rglob("*")) == before


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("report --out", "step-00000001/manifest.json"),
        ("report --out", "new"),
        ("watch --once --textfile", "events.jsonl"),
    ],
)
def test_a_file_of_a_checkpoint_directory_is_not_replaced(
    verb: str, name: str, tmp_path: Path, capsys: Capture
) -> None:
    chk_dir = write(tmp_path / "chk", two_runs())
    (chk_dir / "step-00000001").mkdir()
    (chk_dir / "step-00000001" / "manifest.json").write_text("{}")
    (tmp_path / "way").symlink_to(chk_dir)
    before = {path: path.read_bytes() for path in chk_dir.rglob("*") if path.is_file()}
    for folder in (chk_dir, tmp_path / "way"):
        assert main([*verb.split(), str(folder / name), str(chk_dir)]) == 2
        assert "in which only runs write" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in chk_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("target", ["mine", "nothing"])
def test_a_link_that_somebody_planted_is_not_written_through(
    target: str, tmp_path: Path, capsys: Capture
) -> None:
    chk_dir = write(tmp_path / "chk", two_runs())
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "report.html").symlink_to(target)
    assert main(["report", str(chk_dir)]) == 2
    assert "report.html is a symbolic link: expected a regular file" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "nothing").exists()
