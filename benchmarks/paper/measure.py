"""The paper's models: interval chosen, overhead and recovery time, in the paper's three arms.

    python -m benchmarks.paper                                      all eight, small, on a CPU
    python -m benchmarks.paper --preset gpu --data /data/imagenet   as the paper trained them
    python -m benchmarks.paper --preset gpu --model gpt2-xl --seconds 150

Per model: an AUTO manager trains until its interval k has converged. A manager with that k is then
measured in windows, each between two with no manager attached (see benchmarks.overhead): whole
intervals, cut short if a checkpoint is durable long before the next one is due. Then training stops
for some checkpoints until each is durable. Finally, the newest one is restored into a new model by
a new manager, with its files dropped from the page cache, and compared.

Arm ``auto``: ``overhead`` is that of the undisturbed rounds, with its 95 % interval;
``overhead_all`` that of all rounds. A window that is cut short omits ``step()`` at the remaining
boundaries of its interval: ``added_us`` of benchmarks.decision, each. ``cost_ms`` is the overhead
per checkpoint, in three parts: at the boundary (the state is captured), waiting at the weight
update for the copy, and the slowdown of the rest of training (the difference). ``durable_s`` is
from a boundary until its checkpoint is durable. ``storage_limit`` is a raw direct write of the same
bytes, in iterations: no interval can be shorter. ``synchronous``: the same k, but training stops
for ``held_ms``. ``epoch boundary``: the same once per epoch. ``restore_s`` is creating the manager
and ``restore()``. ``derived`` names the figures that follow by arithmetic, with their formula; all
others are measured. ``recovery_s`` is the average cost of a failure, without the start of the
process (benchmarks.interruptions measures that). A model that fails has a line with ``failed``.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.lab.training import add_device_option
from benchmarks.paper.arms import Report
from benchmarks.paper.trial import Trial
from benchmarks.paper.workloads import Workload, on_cpu, on_gpu
from checkfreq.examples.imagenet.options import is_installed

#: Only trained if named: it needs about 60 GB of device memory and as much on the host.
_ON_REQUEST = ("gpt2-xl",)
_SECONDS = {"cpu": 22.0, "gpu": 40.0}


def main() -> None:
    """Print three lines per model, or one if it failed. Fails if all of them do."""
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True
    ended_well = [run_one(workload, args) for workload in chosen(args)]
    if ended_well and not any(ended_well):
        raise SystemExit("paper: no model could be measured")


def run_one(workload: Workload, args: argparse.Namespace) -> bool:
    """Measure one model and print its lines; returns whether that succeeded."""
    print(f"{workload.model}: about {args.seconds:.0f} s", file=sys.stderr)
    report, why = Report(workload, args), None
    with tempfile.TemporaryDirectory(
        dir=args.folder, prefix="paper-", ignore_cleanup_errors=True
    ) as scratch:
        try:
            report.emit(Trial(workload, Path(scratch), args).measure())
        except SystemExit as error:
            why = str(error)
        except Exception as error:
            traceback.print_exc()
            why = type(error).__name__  # the message may contain a path of this machine
    gc.collect()  # the model is in cycles
    if why is not None:
        print(f"{workload.model}: failed, {why}", file=sys.stderr)
        report.failed(why)
    return why is None


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    preset = "gpu" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--preset", choices=("cpu", "gpu"), default=preset, help="default here: %(default)s")
    add("--model", nargs="+", choices=tuple(on_gpu()), metavar="NAME", help="default: all eight")
    add("--batch", type=int, help="instead of the preset's")
    add("--image-size", type=int, help="instead of the preset's")
    add("--tokens", type=int, help="of a sequence, instead of the preset's")
    add("--amp", action=argparse.BooleanOptionalAction, help="bfloat16 where autocast uses it")
    add("--data", type=Path, help="a folder of images, instead of random batches on the device")
    add("--workers", type=int, default=3, help="that read them")
    add("--epoch-iterations", type=int, help="instead of the preset's")
    add("--seconds", type=float, help="approximate, per model; default: 22, with a GPU 40")
    add("--bound", type=float, default=0.035, help="of AUTO")
    add("--threads", type=int, default=1, help="of torch")
    add("--seed", type=int, default=0)
    add("--folder", default=".", help="a folder on the disk to write to")
    add_device_option(parser)
    args = parser.parse_args(argv)
    args.seconds = args.seconds or _SECONDS[args.preset]
    return args


def chosen(
    args: argparse.Namespace, *, is_there: Callable[[str], bool] = is_installed
) -> Iterator[Workload]:
    """The preset's workloads, changed by the options, without those that are not installed."""
    preset = on_gpu() if args.preset == "gpu" else on_cpu()
    given = {name: getattr(args, name) for name in ("batch", "image_size", "tokens", "amp")}
    changed = {name: value for name, value in given.items() if value is not None}
    if args.epoch_iterations is not None:
        changed["epoch_iterations"] = args.epoch_iterations
        changed["epoch"] = f"{args.epoch_iterations:,} iterations"
    for name in args.model or [each for each in preset if each not in _ON_REQUEST]:
        if name not in preset:
            print(f"{name}: left out, it is not for a CPU", file=sys.stderr)
            continue
        workload = replace(preset[name], device=args.device, **changed)
        missing = [each for each in workload.packages if not is_there(each)]
        if missing:
            print(f"{name}: left out, {missing[0]} is not installed", file=sys.stderr)
        elif args.data is not None and workload.is_language:
            print(f"{name}: left out, --data holds images", file=sys.stderr)
        else:
            yield workload
