"""A SLURM of several nodes on this machine, with a configuration, state and ports of its own.

Partitions: ``main``; ``spot``, whose jobs are preempted (with a grace) by those of ``prio``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "checkfreq" / "examples" / "jobs"
DEADLINE_S = 200.0
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
_LOOK_S = 0.1

#: ``cred_expire`` is how long a requeued job waits. The CPUs are made up: jobs mostly wait.
_CONFIGURATION = """
ClusterName=checkfreq
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
JobRequeue=1
KillWait=20
OverTimeLimit={over_min}
MinJobAge=3600
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=64 RealMemory=64000 State=UNKNOWN
{nodes}
PartitionName=main Nodes=ALL Default=YES PreemptMode=OFF
PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=prio Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"


def why_not() -> str | None:
    """What keeps a SLURM from being started here; None if nothing does."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return (
            f"SLURM is not installed: no {', '.join(missing)} (apt: slurmctld slurmd slurm-client)"
        )
    return None if os.geteuid() == 0 else "slurmd needs root"


def wait_until(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    """Return once ``holds()``; AssertionError with ``what()`` after the deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end_s, what()
        time.sleep(_LOOK_S)


class Cluster:
    """A running SLURM, by its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            self.environment[name] = "1"

    def call(self, *command: str) -> str:
        """What a command prints; AssertionError if it fails."""
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env=self.environment,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{self.logs()}"
        return done.stdout.strip()

    def is_up(self) -> bool:
        """Whether a job could start."""
        command = ["sinfo", "-h", "-o", "%T", "-p", "main"]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environment, timeout=60, check=False
        )
        return done.stdout.strip() == "idle"

    def states(self, job: str) -> list[str]:
        """The state of a job, or of each task of an array."""
        return self.call("squeue", "-h", "-t", "all", "-r", "-j", job, "-o", "%T").split()

    def wait_for_end(self, job: str) -> list[str]:
        """The final state of a job, or of each task of an array."""
        wait_until(
            lambda: set(self.states(job)) <= ENDED,
            lambda: f"job {job} has not ended: {self.call('squeue', '-a')}{self.logs()}",
        )
        return self.states(job)

    def signal_script(self, job: str) -> None:
        """Do at once what ``--signal=B:USR1`` does before the limit."""
        self.call("scancel", "--batch", "--signal=USR1", job)

    def restarts(self, job: str) -> int:
        """How often a job was started again."""
        return int(self.shown(job, "Restarts"))

    def shown(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def logs(self) -> str:
        """What the daemons and the jobs wrote."""
        paths = [*self.folder.glob("*.log"), *self.folder.parent.rglob("job-*.log")]
        return "".join(f"\n== {path}\n{path.read_text(errors='replace')[-4000:]}" for path in paths)


@contextlib.contextmanager
def started(
    folder: Path, *, num_nodes: int = 2, grace_s: int = 60, over_min: int = 0
) -> Iterator[Cluster]:
    """A cluster that lives as long as the block; its jobs and daemons are gone afterwards.

    Its nodes are n1, n2, ...; ``grace_s`` is what preempted jobs get, and ``over_min``
    what jobs get beyond their limit.
    """
    names = [f"n{number}" for number in range(1, num_nodes + 1)]
    for name in ("state", *(f"spool/{name}" for name in names)):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().split(".")[0]
    port, *ports = free_ports(1 + num_nodes)
    nodes = "\n".join(
        _NODE.format(name=name, host=host, port=port)
        for name, port in zip(names, ports, strict=True)
    )
    text = _CONFIGURATION.format(
        host=host, folder=folder, port=port, nodes=nodes, grace_s=grace_s, over_min=over_min
    )
    (folder / "slurm.conf").write_text(text)
    cluster = Cluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for daemon in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in names)):
            with (folder / "daemons.log").open("ab") as out:
                daemons.append(
                    subprocess.Popen(daemon, env=cluster.environment, stdout=out, stderr=out)
                )
        wait_until(
            lambda: cluster.is_up() or any(process.poll() is not None for process in daemons),
            cluster.logs,
        )
        assert cluster.is_up(), cluster.logs()
        yield cluster
        _end_jobs(cluster)
    finally:
        for process in reversed(daemons):
            process.terminate()
        for process in daemons:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_jobs(cluster: Cluster) -> None:
    cluster.call("scancel", "--full", "--signal=KILL", "--user=root")
    cluster.call("scancel", "--user=root")
    wait_until(lambda: not cluster.call("squeue", "-h"), lambda: f"jobs stay{cluster.logs()}")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, for somebody who soon does."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
