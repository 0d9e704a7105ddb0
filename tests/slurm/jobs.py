"""A training as a job: one of the scripts of checkfreq/examples/jobs with `tests.slurm.trainer`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkfreq.store.store import CheckpointStore
from tests.slurm.cluster import SCRIPTS, Cluster, free_ports, wait_until


@dataclass(frozen=True, slots=True)
class Job:
    """Job ``number`` (0: outside SLURM), and the folder that it has for itself."""

    number: str
    folder: Path
    name: str = "chk"

    @property
    def chk_dir(self) -> Path:
        """Its checkpoints; what the trainer notes lies beside them."""
        return self.folder / self.name

    def starts(self, *, rank: int = 0) -> list[int]:
        """The step at which each run so far began."""
        path = self.folder / f"{self.name}.runs.{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["start"] for line in lines]

    def newest(self) -> int:
        """The newest step that has a checkpoint; 0 if none has."""
        return max(CheckpointStore(self.chk_dir).steps(), default=0)

    def stops(self, what: str = "step") -> list[Any]:
        """Of each time that a run was told to stop, the step, or the ``signal``."""
        path = self.chk_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event[what] for event in map(json.loads, lines) if event["kind"] == "stop"]

    def result(self) -> dict[str, Any]:
        """What the trainer wrote at its end."""
        path = self.folder / f"{self.name}.result.json"
        assert path.exists(), self.log()
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def log(self) -> str:
        """What the job printed, in all its runs."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("job-*.log")))

    def wait_for_run(self, number: int) -> None:
        """Return once the ``number``-th run has taken a checkpoint of its own."""
        wait_until(lambda: self._is_under_way(number), lambda: f"run {number}: {self.log()}")

    def _is_under_way(self, number: int) -> bool:
        starts = self.starts()
        return len(starts) >= number and self.newest() > starts[number - 1]


def submit(
    cluster: Cluster,
    script: str,
    folder: Path,
    options: Sequence[str] = (),
    *,
    slow_runs: int = 0,
    command: Sequence[str] = (),
    export: str = "",
) -> Job:
    """Submit a script with ``options`` of sbatch; ``command`` instead of the trainer.

    That one acts on signals alone, so that it is the script that is tested.
    """
    arguments = [*submission(folder, export), *options, str(SCRIPTS / script)]
    number = cluster.call(
        "sbatch", "--parsable", *arguments, *(command or trainer(folder, slow_runs))
    )
    return Job(number, folder)


def submission(folder: Path, export: str = "") -> list[str]:
    """sbatch's options for a job in ``folder``; ``export`` are more variables of its own."""
    folder.mkdir(exist_ok=True)
    master = f"MASTER_ADDR=127.0.0.1,MASTER_PORT={free_ports(1)[0]}"  # its nodes are no hosts
    given = ",".join(filter(None, ("ALL", master, f"CHK_ROOT={folder}", export)))
    return ["--mem=100", f"--output={folder}/job-%j.log", f"--export={given}"]


def bare(
    cluster: Cluster,
    folder: Path,
    *options: str,
    slow_runs: int,
    more: Sequence[str] = (),
    export: str = "",
    within: Sequence[str] = (),
) -> Job:
    """Submit a job that is the trainer alone, which asks SLURM for its end and requeues itself.

    ``more``: options of the trainer. ``within``: a command that runs it.
    """
    trains = [*within, *_python(slow_runs), "--requeue", *more, str(folder / "chk")]
    command = shlex.join(["exec", "srun", *trains])
    options = (*submission(folder, export), "--requeue", "--open-mode=append", *options)
    return Job(cluster.call("sbatch", "--parsable", *options, f"--wrap={command}"), folder)


def trainer(folder: Path, slow_runs: int, *, into: str = "chk") -> list[str]:
    """The command that trains, slowly in its first runs, and acts on signals alone."""
    where = [str(folder / into)] if into else []
    return [*_python(slow_runs), "--only-signals", *where]


def _python(slow_runs: int) -> list[str]:
    return [sys.executable, "-m", "tests.slurm.trainer", f"--slow-runs={slow_runs}"]
