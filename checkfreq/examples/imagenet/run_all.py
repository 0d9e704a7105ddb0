"""Trains the paper's models, each with a synchronous checkpoint per epoch and with CheckFreq.

    python -m checkfreq.examples.imagenet.run_all DATA OUT THREADS

``OUT/<model>-<arm>`` gets the log, the report and the checkpoints of a training. Started again,
what is finished stays, and what was interrupted goes on. Options that are not this script's
are passed to each training, whose own are ``-b 256 --epochs 2`` as in 2021.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from checkfreq.examples.imagenet.models import MODELS

ARMS = {"epoch": ("--chk-freq", "0", "--chk_mode_baseline"), "checkfreq": ()}


def main(argv: list[str] | None = None) -> None:
    """Train, and print a line for each; ends with status 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m checkfreq.examples.imagenet.run_all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data", metavar="DATA", help="a folder with train/ and val/")
    add("out", type=Path, metavar="OUT", help="a folder for the results")
    add("threads", metavar="THREADS", help="loader processes of each rank")
    add("-a", "--arch", action="append", help="train this model; may be given several times")
    add("--nproc-per-node", default=max(1, torch.cuda.device_count()), help="default: all GPUs")
    args, passed_on = parser.parse_known_args(argv)
    failed = False
    for arch in args.arch or MODELS:
        for arm, flags in ARMS.items():
            folder = args.out / f"{arch}-{arm}"
            folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [
                f"--nproc-per-node={args.nproc_per_node}",
                "-m",
                "checkfreq.examples.imagenet",
            ]
            command += ["--data", args.data, "-a", arch, "--workers", args.threads, "--checkfreq"]
            command += ["--cf_iterator", "--deterministic", "--noeval", "--barrier", *flags]
            command += ["-b", "256", "--epochs", "2"]
            command += [
                "--chk-prefix",
                str(folder / "chk"),
                "--report",
                str(folder / "report.json"),
            ]
            began_s = time.monotonic()
            with (folder / "log").open("ab") as log:
                done = subprocess.run([*command, *passed_on], stdout=log, stderr=log)
            took = f"{arch:<14}{arm:<11}{time.monotonic() - began_s:7.0f} s"
            if done.returncode == 0:
                report = json.loads((folder / "report.json").read_text())
                print(
                    f"{took}  durable step {report['checkpoints']['last_durable_step']}", flush=True
                )
            else:
                print(f"{took}  failed: see {folder / 'log'}", flush=True)
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
