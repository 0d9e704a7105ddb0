"""``checkfreq doctor``: what it finds here, what it makes of bad machines, what a page hides."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkfreq.cli import main
from checkfreq.doctor import accelerators, cluster, machine
from checkfreq.doctor.findings import Finding, Section, Status, section, worst
from checkfreq.doctor.page import hidden, page
from checkfreq.doctor.storage import Storage
from checkfreq.notices.command import Output

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

Capture = pytest.CaptureFixture[str]


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in findings}


def answering(answers: dict[str, Output]) -> Callable[..., Output]:
    """What commands would say."""
    return lambda argv, timeout_s: answers.get(argv[0], Output(None, "", f"{argv[0]}: not found"))


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
    names = {one["section"]: [f["name"] for f in one["findings"]] for one in sections.values()}
    assert names["versions"] == ["versions", "system", "environment"]
    assert names["storage"] == [
        *(
            "file_system",
            "access",
            "room",
            "rename",
            "lock",
            "hard_link",
            "symbolic_link",
            "socket",
        ),
        *("direct_io", "write_speed", "read_speed", "sync_time"),
    ]
    assert names["memory"] == [
        *("host_memory", "cgroup_limit", "memfd", "dev_shm", "processors"),
        *("file_size_limit", "open_files_limit", "pidfd"),
    ]
    assert names["accelerators"][:3] == ["kernel_and_driver", "nvml", "pinned_memory"]
    assert os.listdir(tmp_path) == ["mine"]


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("none\x1b[2J", "file"):
        assert main(["doctor", str(tmp_path / name)]) == 1
        told = capsys.readouterr()
        assert "is not a directory: make it first" in told.err
        assert "\x1b" not in told.err
        assert told.out == ""


# ---- storage


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    # Not even root can make a folder in /proc.
    found = by_name(Storage(Path("/proc/self"), num_bytes=MIB).all())
    assert [*found] == ["writable"]
    assert found["writable"].status is Status.PROBLEM
    assert "Mount it read-write" in found["writable"].mend


def test_memory_is_no_place_for_checkpoints_and_its_syncs_are_not_called_good() -> None:
    memory = Storage(Path("/dev/shm"), num_bytes=MIB)
    kind = by_name(memory.kind())["file_system"]
    assert (kind.status, kind.found) == (Status.WARNING, "tmpfs")
    synced = by_name(memory.all())["sync_time"]
    assert synced.status is Status.NOTE
    assert "syncs reach no disk" in synced.means


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


def test_what_a_killed_doctor_leaves_goes_with_the_next_run(tmp_path: Path) -> None:
    from checkfreq.store.store import CheckpointStore

    (tmp_path / ".tmp-doctor-1-2").mkdir()
    (tmp_path / ".tmp-doctor-1-2" / "payload").write_text("x")
    CheckpointStore(tmp_path).open()
    assert not (tmp_path / ".tmp-doctor-1-2").exists()


# ---- memory, processors, versions


def test_small_shared_memory_is_a_warning_that_says_how_to_mend_it(tmp_path: Path) -> None:
    found = by_name(machine.shared_memory(tmp_path / "none"))
    assert found["memfd"].status is Status.GOOD
    assert found["dev_shm"].status is Status.WARNING
    assert "--shm-size" in found["dev_shm"].mend


@pytest.mark.parametrize(
    ("text", "quota"), [("50000 100000\n", 0.5), ("max 100000\n", None), ("odd", None)]
)
def test_a_quota_of_processors_is_found(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    (found,) = machine.processors(tmp_path / "cpu.max")
    assert found.figures["quota"] == quota
    if quota is not None:
        assert found.status is Status.NOTE
        assert "OMP_NUM_THREADS" in found.mend


def test_only_variables_that_hold_no_secrets_are_shown() -> None:
    given = {"AWS_SECRET_ACCESS_KEY": "hunter2hunter2", "OMP_NUM_THREADS": "4"}
    (found,) = machine.environment(given)
    assert (found.status, found.found) == (Status.GOOD, "OMP_NUM_THREADS=4")
    (found,) = machine.environment({**given, "CHECKFREQ_FAULT": "commit.rename:kill-self"})
    assert found.status is Status.WARNING
    assert "hunter2" not in str(found)


# ---- accelerators


def test_a_probe_that_hangs_is_a_warning_and_not_waited_for() -> None:
    (found,) = accelerators.pinning(MIB, timeout_s=0.01)
    assert found.status is Status.WARNING
    assert "did not answer within 0.01 s" in found.found


def test_an_accelerator_is_told_with_the_speed_of_copies_into_pinned_memory() -> None:
    from checkfreq.snapshot.probe import pinned
    from tests.snapshot.test_backends import ToyDevice

    toy = ToyDevice()
    with ThreadPoolExecutor(1) as pool:  # a toy may not be waited for in the thread that made it
        told = pool.submit(pinned, toy, toy.allocate(MIB, None), MIB).result()
    assert told["problem"] == ""
    about = {"torch": "2.13", "kind": "toy", "runtime": "1.0", "devices": toy.names()}
    found = by_name(accelerators.told_of({**about, **told, "num_bytes": MIB, "copy_s": 0.001}))
    assert found["devices"].found == "Toy 1 (toy 1.0)"
    assert "1.0 MiB in " in found["pinned_memory"].found
    assert "1.0 GB/s" in found["pinned_memory"].found


def test_memory_that_cannot_be_pinned_is_a_warning_with_what_is_known() -> None:
    told = {"kind": "toy", "runtime": "1.0", "devices": ["Toy 1"], "num_bytes": MIB}
    told |= {"problem": "cudaHostRegister returned error 801", "code": 801}
    found = by_name(accelerators.told_of(told))["pinned_memory"]
    assert found.status is Status.WARNING
    assert found.found == "cannot pin 1.0 MiB: cudaHostRegister returned error 801"
    assert "does not pin memory that it did not allocate" in found.mend


# ---- SLURM


def test_the_time_that_a_job_has_left_is_told() -> None:
    answers = {
        "squeue": Output(0, "1:30:00\n", ""),
        "scontrol": Output(0, "JobId=7 Requeue=1 Restarts=0\n", ""),
    }
    found = by_name(cluster.slurm({"SLURM_JOB_ID": "7"}, run=answering(answers)))
    assert (found["slurm"].found, found["slurm"].figures) == ("90 min left", {"left_s": 5400.0})
    assert found["slurm_requeue"].status is Status.GOOD


def test_a_controller_that_does_not_answer_is_a_warning() -> None:
    (found,) = cluster.slurm({"SLURM_JOB_ID": "7"}, run=answering({}))
    assert found.status is Status.WARNING
    assert "CFConfig(deadline=" in found.mend
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1900000000"}
    (found,) = cluster.slurm(environ, run=answering({}))
    assert found.status is Status.NOTE


# ---- an object store


def test_an_object_store_is_written_read_and_left_empty(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("obstore")
    from checkfreq.doctor.remote import object_store

    found = by_name(object_store(f"file://{tmp_path}/mirror", num_bytes=MIB))
    assert [*found] == ["list", "write", "conditional_write", "upload", "download", "remove"]
    assert {one.status for one in found.values()} == {Status.GOOD}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_object_store_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    from checkfreq.doctor.remote import object_store

    (tmp_path / "mirror").mkdir()
    found = by_name(object_store("file:///proc/self", num_bytes=MIB))
    assert found["write"].status is Status.PROBLEM
    assert "delete under the prefix" in found["write"].mend


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


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: Capture) -> None:
    assert main(["doctor", "--page", str(tmp_path / "no" / "x.md")]) == 2
    assert "cannot be written" in capsys.readouterr().err
