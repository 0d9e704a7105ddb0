"""``checkfreq doctor``: what it finds here, what it makes of bad machines, what a page hides."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq.cli import main
from checkfreq.doctor import accelerators
from checkfreq.doctor.findings import Finding, Section, Status, section, worst
from checkfreq.doctor.page import hidden, page
from checkfreq.doctor.storage import Storage

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

Capture = pytest.CaptureFixture[str]


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in findings}


# ---- the command


@pytest.mark.slow
def test_json_is_one_document_of_sections_and_the_directory_is_left_as_it_was(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(["doctor", str(tmp_path), "--size", "2MiB", "--json"]) == 0
    sections = {one["section"]: one for one in json.loads(capsys.readouterr().out)["sections"]}
    assert [*sections] == ["versions", "storage", "memory", "accelerators", "slurm"]
    for one in sections.values():
        for finding in one["findings"]:
            assert [*finding] == ["name", "status", "found", "means", "mend", "figures"]
            assert finding["means"]
            assert finding["mend"] or finding["status"] in ("ok", "note")
    assert os.listdir(tmp_path) == ["mine"]


# ---- storage


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    # Not even root can make a folder in /proc.
    found = by_name(Storage(Path("/proc/self"), num_bytes=MIB).all())
    assert [*found] == ["writable"]
    assert found["writable"].status is Status.PROBLEM
    assert "Mount it read-write" in found["writable"].mend


def test_a_directory_that_all_may_write_to_is_a_warning(tmp_path: Path) -> None:
    place = tmp_path / "shared" / "chk"
    place.mkdir(parents=True)
    access = Storage(place, num_bytes=MIB).access
    place.chmod(0o775)
    assert by_name(access())["access"].status is Status.GOOD
    place.chmod(0o1777)  # files of others can be planted all the same
    found = by_name(access())["access"]
    assert (found.status, found.found) == (Status.WARNING, "all users may write to the directory")
    place.chmod(0o755)
    place.parent.chmod(0o777)
    found = by_name(access())["access"]
    assert found.found == "all users may write to .."
    assert "chmod o-w" in found.mend


# ---- accelerators


def test_a_probe_that_hangs_is_a_warning_and_not_waited_for() -> None:
    (found,) = accelerators.pinning(MIB, timeout_s=0.01)
    assert found.status is Status.WARNING
    assert "did not answer within 0.01 s" in found.found


def test_memory_that_cannot_be_pinned_is_a_warning_with_what_is_known() -> None:
    told = {"kind": "toy", "runtime": "1.0", "devices": ["Toy 1"], "num_bytes": MIB}
    told |= {"problem": "cudaHostRegister returned error 801", "code": 801}
    found = by_name(accelerators.told_of(told))["pinned_memory"]
    assert found.status is Status.WARNING
    assert found.found == "cannot pin 1.0 MiB: cudaHostRegister returned error 801"
    assert "does not pin memory that it did not allocate" in found.mend


# ---- findings and the page


def test_a_check_that_fails_is_a_finding_and_hides_no_other() -> None:
    def _broken() -> Iterator[Finding]:
        yield Finding("first", Status.GOOD, "x", "y")
        raise RuntimeError("no\x1b[2Jidea")

    def _fine() -> Iterator[Finding]:
        yield Finding("last", Status.WARNING, "x", "y")

    found = section("all", _broken, _fine)
    assert [one.name for one in found.findings] == ["first", "broken", "last"]
    assert found.findings[1].found == r"RuntimeError: no\x1b[2Jidea"
    assert worst([found]) is Status.WARNING
    assert worst([]) is Status.GOOD


def test_a_page_names_no_person_machine_place_or_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    hide = hidden(
        directory="/data/secretproject/chk",
        url="s3://company-bucket/run",
        home="/home/ann",
        user="ann",
        hosts=["node17.corp.example", ""],
    )
    told = (
        "cannot write /data/secretproject/chk/x and /home/ann/y on node17 (node17.corp.example) "
        "at 10.1.2.3 as ann: key wJalrXUtnFEMI/K7MDENG of ann@corp.example, "
        "s3://company-bucket/run/a and gs://other-bucket/b, https://ann:pw@host/?sig=abc"
    )
    written = page(
        [Section("storage", (Finding("x", Status.WARNING, told, told, told),))], hide=hide
    )
    for secret in (
        *("secretproject", "/home/ann", "node17", "10.1.2.3", "wJalrXUtnFEMI", "corp.example"),
        *("company-bucket", "other-bucket", ":pw@", "sig=abc", " ann"),
    ):
        assert secret not in written
    assert "cannot write DIR/x and ~/y on HOST" in written


def test_a_page_names_no_bucket_that_an_error_of_the_store_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    with socket.socket() as nobody:  # bound, and not listening: each request is refused
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{nobody.getsockname()[1]}")
        for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "x")):
            monkeypatch.setenv(f"AWS_{name}", value)
        url = "s3://company-bucket/team/secret-run"
        main(["doctor", "--mirror", url, "--page", str(tmp_path / "page.md")])
    written = (tmp_path / "page.md").read_text()
    assert "/BUCKET?list-type=2&prefix=PREFIX%2Fdoctor-" in written
    assert "company-bucket" not in written
    assert "secret-run" not in written
    assert str(tmp_path) not in written
    assert written.startswith("# checkfreq doctor\n")
    assert "| ok | versions | checkfreq " in written
