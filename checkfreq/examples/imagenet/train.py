"""Trains an image classifier: ``python -m checkfreq.examples.imagenet --data DIR ...``.

The original CheckFreq script's flags and its arms:

* ``--checkfreq --cf_iterator``: as often as ``--max-overhead`` allows, in two phases;
* ``... --chk-freq N``: every N updates;
* ``... --chk-freq 0``: a checkpoint per epoch;
* ``... --chk_mode_baseline``: the same checkpoints, but training waits until each is durable;
* without ``--checkfreq``: none.

``--dali`` reads the images with NVIDIA DALI. Several ranks train together, with ``--batch-size``
images each per update, started by ``torchrun --standalone --nproc-per-node 4 -m
checkfreq.examples.imagenet ...`` or ``python -m torch.distributed.launch``; with ``--max-restarts``
a run survives the death of a rank. A run that was told to stop (SIGTERM, SIGUSR1) leaves
``<chk-prefix>.stopped`` and ends with status 75, or with 0 under torchrun, which would restart it.

Started again with the same flags it continues in mid-epoch, with the same bits under
``--deterministic``. `main` is the part to copy into your own script.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from checkfreq.examples.imagenet import options
from checkfreq.examples.imagenet.images import Data, images_and_target, torch_data
from checkfreq.examples.imagenet.models import build, logits_of, loss_of
from checkfreq.examples.imagenet.progress import History, Progress
from checkfreq.examples.imagenet.ranks import Ranks, joined, stopping
from iterators import CFIterator, isolated_rng

Batches = CFIterator | DataLoader[Any]


def main(argv: list[str] | None = None) -> None:
    """Train for ``--epochs`` in all, from the newest checkpoint if there is one."""
    args = options.parse(argv)
    with joined(args) as ranks, stopping(Path(f"{args.chk_prefix}.stopped"), ranks):
        train(args, ranks)


def train(args: argparse.Namespace, ranks: Ranks) -> None:
    """The training of one rank."""
    settle_randomness(args)
    data = open_data(args, ranks)
    task = make_task(args, ranks, num_classes=data.num_classes, steps_per_epoch=len(data.train))

    with History(args.history, ranks) as history, open_manager(args, task) as cf_manager:
        batches: Batches = data.train
        if args.cf_iterator:
            batches = CFIterator(
                data.train, seed=args.seed, cf_manager=cf_manager, steps_to_run=args.steps_to_run
            )
        if cf_manager is not None:
            form_buckets(task, cf_manager, args, ranks)
            cf_manager.restore()
        for epoch in epochs_of(batches, args.epochs, history):
            with Progress(
                epoch, batches, history=history, cf_manager=cf_manager, args=args, ranks=ranks
            ) as progress:
                train_epoch(batches, task, cf_manager, progress, args)
            if progress.epoch_is_over and not args.noeval:
                with isolated_rng():  # its random draws must not affect training
                    evaluate(epoch, data.val(), task, args, ranks)
            if args.barrier:
                ranks.meet()
    if args.report:  # now that the last checkpoint is durable
        write_report(args.report, task=task, batches=batches, cf_manager=cf_manager)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The model and everything that trains it. ``best`` is a dict so that it is checkpointed too.

    ``model`` is wrapped by DDP if there are several ranks, ``bare`` never is.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    amp: bool
    scaler: torch.amp.GradScaler | None
    criterion: nn.Module
    device: torch.device
    best: dict[str, float]

    @property
    def bare(self) -> nn.Module:
        """The model itself."""
        wrapped = isinstance(self.model, DistributedDataParallel)
        return self.model.module if wrapped else self.model

    def tracked(self) -> dict[str, Any]:
        """Everything that a resume needs; the iterator adds its position, checkfreq the RNGs."""
        names = ("model", "optimizer", "scheduler", "best")
        scaler = {} if self.scaler is None else {"scaler": self.scaler}
        return {name: getattr(self, name) for name in names} | scaler


def make_task(
    args: argparse.Namespace, ranks: Ranks, *, num_classes: int, steps_per_epoch: int
) -> Task:
    """A fresh model with its optimizer, schedule and, under ``--amp`` on CUDA, loss scaler."""
    device = torch.device(args.device)
    model = ranks.wrap(build(args.arch, num_classes=num_classes).to(device))
    if not ranks.is_alone:
        torch.manual_seed(args.seed + ranks.rank)  # equal weights, but different dropout
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr * args.batch_size * ranks.world / 256,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step / steps_per_epoch, args)
    )
    return Task(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        amp=args.amp,
        scaler=torch.amp.GradScaler("cuda") if args.amp and device.type == "cuda" else None,
        criterion=nn.CrossEntropyLoss(reduction="none").to(device),
        device=device,
        best={"accuracy": 0.0, "epoch": -1},
    )


def lr_factor(epochs_done: float, args: argparse.Namespace) -> float:
    """The learning rate as a fraction of ``--lr``, after ``epochs_done`` epochs (a fraction).

    It depends on the number of updates since training began, which the scheduler keeps in its
    checkpoint: never on a batch index, which starts at 0 in every process.
    """
    if epochs_done < args.warmup_epochs:
        return 0.01 + 0.99 * epochs_done / args.warmup_epochs
    if args.lr_schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, epochs_done / args.epochs)))
    return 0.1 ** (int(epochs_done) * 3 // args.epochs)  # a tenth after each third


@contextlib.contextmanager
def open_manager(args: argparse.Namespace, task: Task) -> Iterator[CFManager | None]:
    """The CheckFreq manager, or None without ``--checkfreq``."""
    if not args.checkfreq:
        yield None
        return
    chk = CFCheckpoint(**task.tracked())
    mode = CFMode.AUTO if args.chk_freq is None else CFMode.MANUAL
    with CFManager(
        args.chk_prefix,
        chk,
        mode=mode,
        chk_freq=args.chk_freq,
        max_overhead=0.035 if args.max_overhead is None else args.max_overhead,
        dynamic=not args.static,
        mtbf_s=args.mtbf,
        fresh=args.fresh,
        config=CFConfig(split_replicated=args.split_replicated),
    ) as cf_manager:
        yield cf_manager


def form_buckets(task: Task, cf_manager: CFManager, args: argparse.Namespace, ranks: Ranks) -> None:
    """Above two ranks, run two backward passes before a restore and discard them.

    DDP rebuilds its gradient buckets when the second pass begins, in the order in which the
    gradients of the first one became ready. The position in a bucket determines the order in which
    three or more ranks are summed, and so the last bits: with the first buckets, the first update
    of a resumed run would differ from that of a run that never stopped. The restore overwrites what
    the passes did to buffers and random generators.
    """
    (found,) = ranks.summed(cf_manager.latest_step() is not None)
    if ranks.world <= 2 or args.fresh or not found:
        return
    images = torch.zeros(2, 3, args.image_size, args.image_size, device=task.device)
    target = torch.zeros(2, dtype=torch.long, device=task.device)
    for _ in range(2):
        with torch.autocast(task.device.type, enabled=task.amp):
            output = task.model(images)
            loss_of(task.criterion, output=output, target=target).mean().backward()
    task.optimizer.zero_grad()


def epochs_of(batches: Batches, total: int, history: History) -> Iterator[int]:
    """Epoch numbers from 0; a resumable iterator continues where its checkpoint was taken."""
    epochs = batches.epochs(total) if isinstance(batches, CFIterator) else iter(range(total))
    for epoch in epochs:
        history.write_epoch(batches)  # the one before, whose last boundary has now been passed
        if isinstance(batches, DataLoader) and isinstance(batches.sampler, DistributedSampler):
            batches.sampler.set_epoch(epoch)
        yield epoch
    history.write_epoch(batches)


def train_epoch(
    batches: Batches,
    task: Task,
    cf_manager: CFManager | None,
    progress: Progress,
    args: argparse.Namespace,
) -> None:
    """One epoch, or what is left of it. Its last boundary is passed later, after the tail."""
    task.model.train()
    for batch in batches:
        stay_synchronous(cf_manager, args)
        train_step(batch, Share.of(batches), task, cf_manager, progress)


@dataclass(frozen=True, slots=True)
class Share:
    """Which samples of a batch count, on this rank and in total.

    ``weights`` [N] is 0 for the pad of a rank that has no sample left at the end of an epoch; None:
    all count. ``num_samples`` is over all ``world`` ranks, None without a resumable order.
    """

    weights: torch.Tensor | None = None
    num_samples: int | None = None
    world: int = 1

    @classmethod
    def of(cls, batches: Iterable[Any]) -> Share:
        """The share of the last batch."""
        if not isinstance(batches, CFIterator) or batches.last_weights is None:
            return cls()
        weights = torch.tensor(batches.last_weights)
        return cls(weights, batches.last_num_samples, batches.world)

    def counts(self, target: torch.Tensor) -> torch.Tensor:
        """[N] float32 on the host: 1 for an image, 0 for a pad."""
        return torch.ones(len(target)) if self.weights is None else self.weights

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The mean of ``losses`` [N] over the whole batch, once DDP has averaged over ranks."""
        if self.weights is None or self.num_samples is None:
            return losses.mean()
        weights = self.weights.to(losses.device, non_blocking=True)
        return (losses * weights).sum() * (self.world / self.num_samples)


def train_step(
    batch: Any, share: Share, task: Task, cf_manager: CFManager | None, progress: Progress
) -> None:
    """Forward, backward and update of one batch."""
    images, target = images_and_target(batch)
    images = images.to(task.device, non_blocking=True)
    target = target.to(task.device, non_blocking=True)
    with torch.autocast(task.device.type, enabled=task.amp):
        output = task.model(images)
        loss = share.mean(loss_of(task.criterion, output=output, target=target))
    (loss if task.scaler is None else task.scaler.scale(loss)).backward()
    weight_update(task, cf_manager)
    task.optimizer.zero_grad()
    task.scheduler.step()
    progress.update(
        loss=loss.detach(),
        logits=logits_of(output).detach(),
        target=target,
        counts=share.counts(target),
    )


def weight_update(task: Task, cf_manager: CFManager | None) -> None:
    """The optimizer's step, through the manager if there is one: it waits for the copy."""
    if cf_manager is not None:
        cf_manager.weight_update(scaler=task.scaler)
    elif task.scaler is not None:
        task.scaler.step(task.optimizer)
        task.scaler.update()
    else:
        task.optimizer.step()


def stay_synchronous(cf_manager: CFManager | None, args: argparse.Namespace) -> None:
    """The baseline: continue only when the checkpoint of the last boundary is durable.

    Requested in advance, so that it is taken at that boundary even if it has to wait for memory.
    """
    if cf_manager is None or not args.chk_mode_baseline:
        return
    cf_manager.wait()
    if args.chk_freq and (cf_manager.global_step + 1) % args.chk_freq == 0:
        cf_manager.save()


@torch.no_grad()
def evaluate(
    epoch: int, batches: Iterable[Any], task: Task, args: argparse.Namespace, ranks: Ranks
) -> float:
    """The accuracy over all ranks' validation images; remembers the best."""
    ranks.share_buffers(task.bare)
    task.bare.eval()
    correct = seen = 0.0
    for batch in batches:
        images, target = images_and_target(batch)
        counts = Share.of(batches).counts(target)
        logits = logits_of(task.bare(images.to(task.device)))  # in DDP, ranks would have to meet
        correct += float((counts * (logits.argmax(1).cpu() == target.cpu())).sum())
        seen += float(counts.sum())
    correct, seen = ranks.summed(correct, seen)
    accuracy = correct / max(seen, 1)
    if accuracy > task.best["accuracy"]:
        task.best.update(accuracy=accuracy, epoch=epoch)
    if not args.quiet:
        tqdm.write(f"epoch {epoch + 1}/{args.epochs}: validation accuracy {accuracy:.1%}")
    return accuracy


def settle_randomness(args: argparse.Namespace) -> None:
    """Seed the weights; under ``--deterministic`` also ask for repeatable kernels."""
    torch.manual_seed(args.seed)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)


def open_data(args: argparse.Namespace, ranks: Ranks) -> Data:
    """The loaders; a folder without images ends the process with a sentence."""
    try:
        if not args.dali:
            return torch_data(args, ranks)
        from checkfreq.examples.imagenet.dali_images import dali_data  # DALI is optional

        return dali_data(args, ranks)
    except FileNotFoundError as error:
        raise SystemExit(f"--data {args.data}: {error}") from error


def digest(state: dict[str, Any]) -> str:
    """One SHA-256 over every tensor of a state dict: name, type, shape and bits."""
    total = hashlib.sha256()
    for name, tensor in sorted(_tensors(state)):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy())
    return total.hexdigest()


def _tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors(value, f"{prefix}.{key}")


def write_report(
    path: Path,
    *,
    task: Task,
    batches: Batches,
    cf_manager: CFManager | None,
) -> None:
    """The result of the run as JSON: digests, the data ledger, checkpoint statistics."""
    report: dict[str, Any] = {
        "weights": digest(task.bare.state_dict()),
        "optimizer": digest(task.optimizer.state_dict()),
        "learning_rate": task.scheduler.get_last_lr(),
        "best": task.best,
    }
    if isinstance(batches, CFIterator):
        report["position"] = batches.state_dict()
    if cf_manager is not None:
        report["checkpoints"] = cf_manager.stats()
    path.write_text(json.dumps(report, indent=2) + "\n")
