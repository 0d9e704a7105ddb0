"""From symptoms to likely causes: a table of rules, the most specific first.

A rule looks at the first difference, at what was not as it should be right after the restore, and
at what the two runs did up to there. It says what it found, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from checkfreq.crashtest.compare import Difference, Item, What, changes
from checkfreq.crashtest.history import Line, Record, State


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause: a name for programs, what was seen, and what to do."""

    name: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules look at. ``failed``: the end of the output of a life that could not go on."""

    difference: Difference | None
    whole: Record = field(default_factory=Record)
    failed: str = ""
    was_torn: bool = False

    @property
    def items(self) -> tuple[Item, ...]:
        """What differs at the first boundary that does."""
        return self.difference.items if self.difference else ()

    def has(self, *kinds: What) -> bool:
        """Whether something of these kinds differs."""
        return any(item.what in kinds for item in self.items)

    def not_restored(self) -> list[Item]:
        """State that was not right from the start: before anything was trained."""
        one = self.difference
        if one is None or one.before is None or one.begin is None:
            return []
        items = changes(one.before[1], one.begin[1])
        return [item for item in items if item.what is not What.GENERATOR]

    def values(self) -> dict[str, tuple[str, str]]:
        """The user's variables that were not the same at the step that was restored."""
        one = self.difference
        if one is None or one.before is None or one.begin is None:
            return {}
        return _pairs(one.before[0].values, one.begin[0].values)

    def values_after(self) -> dict[str, tuple[str, str]]:
        """The user's variables that are not the same where the difference shows."""
        one = self.difference
        if one is None or one.expected is None or one.found is None:
            return {}
        return _pairs(one.expected.values, one.found.values)

    def untracked(self) -> Iterator[tuple[str, str]]:
        """(name, kind) of objects with a state that no checkpoint holds, and that differ."""
        if self.difference is None:
            return
        differing = [item.name for item in (*self.not_restored(), *self.items)]
        for name, kind in self.difference.untracked.items():
            of_it = f"{name}."
            if any(one.startswith(of_it) for one in differing) and not self._is_restored(of_it):
                yield name, kind

    def _is_restored(self, prefix: str) -> bool:
        """Whether some of an object came back: it is saved, as scripts without a manager do."""
        one, at_start = self.difference, self.whole.at(0)
        if one is None or one.before is None or one.begin is None or at_start is None:
            return False
        first, expected, found = at_start[1], one.before[1], one.begin[1]
        return any(
            name.startswith(prefix) and first.get(name) != text and found.get(name) == text
            for name, text in expected.items()
        )


def _pairs(one: State | None, other: State | None) -> dict[str, tuple[str, str]]:
    if one is None or other is None:
        return {}
    return {k: (one[k], other[k]) for k in one if k in other and one[k] != other[k]}


Rule = Callable[[Evidence], Cause | None]


def likely_causes(evidence: Evidence) -> list[Cause]:
    """What may be behind it, the likeliest first."""
    found = (rule(evidence) for rule in RULES)
    causes = [cause for cause in found if cause is not None]
    if any(cause.name not in _LAST_RESORTS for cause in causes):
        causes = [cause for cause in causes if cause.name not in _LAST_RESORTS]
    return causes or ([_UNKNOWN] if evidence.difference else [])


_LAST_RESORTS = ("untracked-variable", "non-deterministic-kernel", "generator")
_UNKNOWN = Cause(
    "untracked-state",
    "Training depends on something that no checkpoint holds, and that is in none of the variables "
    "that could be looked at.",
    "Look for state in C++ libraries, in files, on other machines; for kernels that are not "
    "deterministic: torch.use_deterministic_algorithms(True).",
)


# ---- the save


def _unreadable(evidence: Evidence) -> Cause | None:
    if not evidence.failed:
        return None
    last = [line for line in evidence.failed.splitlines() if line.strip()][-1:]
    said = last[0].strip() if last else "no output"
    if evidence.was_torn or _TORN.search(evidence.failed):
        return Cause(
            "non-durable-save",
            "The script was killed in the middle of writing its checkpoint, and could not read "
            f"what was left of it: {said}",
            "Write to another name in the same folder, sync the file, rename it over the old one, "
            "and sync the folder; keep the checkpoint before it. checkfreq.helpers.atomic_save and "
            "CFManager do that.",
        )
    return Cause(
        "resume-fails",
        f"The script could not go on after a kill: {said}",
        "Start it by hand in the folder that --keep leaves.",
    )


_TORN = re.compile(
    r"EOFError|BadZipFile|failed finding central directory|PytorchStreamReader|UnpicklingError|"
    r"Ran out of input|incomplete metadata|HeaderTooLarge|truncated|InvalidHeader"
)


def _lost_all(evidence: Evidence) -> Cause | None:
    one = evidence.difference
    if one is None or not evidence.was_torn or one.restored or one.first.what is not What.LENGTH:
        return None
    return Cause(
        "non-durable-save", "After a kill in the middle of a save, training began anew.", ""
    )


def _torn_copy(evidence: Evidence) -> Cause | None:
    """Some of what was restored is right, and the rest is that of another step."""
    one = evidence.difference
    wrong = [item for item in evidence.not_restored() if item.what is What.TENSOR]
    if one is None or not wrong:
        return None
    named = {item.name: item.found for item in wrong}
    for step, line, state in evidence.whole.steps():
        if line.kind == "step" and step != one.restored:
            same = [name for name, text in named.items() if state.get(name) == text]
            if same and all(item.name in one.begin[1] for item in wrong if one.begin):
                return Cause(
                    "torn-copy",
                    f"The checkpoint of step {one.restored} holds {same[0]} of step {step}: it was "
                    "copied while training went on.",
                    "Copy all state at one boundary, before the next forward pass: BatchNorm's "
                    "statistics change there. state_dict() copies nothing: clone each tensor, or "
                    "use CFManager.",
                )
    return None


# ---- objects that no checkpoint holds


def _untracked(evidence: Evidence) -> Cause | None:
    """The likeliest of the objects that were not restored."""
    found = [
        (rank, name, what, variable, kind)
        for variable, kind in evidence.untracked()
        for rank, (pattern, name, what) in enumerate(_UNTRACKED)
        if re.search(pattern, f"{kind} {variable}", re.IGNORECASE)
    ]
    if not found:
        return None
    _, name, what, variable, kind = min(found, key=lambda one: one[0])
    title = kind.split()[0].rpartition(".")[2]
    return Cause(
        name,
        f"`{variable}`, {what} ({title}), is in no checkpoint: after a restore it starts anew.",
        f"Track it: CFCheckpoint(..., {variable}={variable}), or save and load its state_dict().",
    )


#: What stands in the names of a class, its bases or the variable; the cause; what to call it.
_UNTRACKED = (
    (r"scaler", "lost-scaler", "a gradient scaler"),
    (r"lr_scheduler|schedul", "forgotten-scheduler", "a scheduler"),
    (r"torch\.optim\.(?!swa)", "untracked-optimizer", "an optimizer"),
    (r"AveragedModel|ema|swa", "missing-ema", "an average of the weights"),
    (r"", "untracked-object", "an object with a state"),
)


# ---- batches


def _position(evidence: Evidence) -> Cause | None:
    item = next((i for i in evidence.items if i.what is What.SAMPLES), None)
    if item is None:
        return None
    return _contents(evidence) if "of the same samples" in item.name else _other_order(evidence)


def _other_order(evidence: Evidence) -> Cause | None:
    """Which step of the uninterrupted run had the batch that was served."""
    one = evidence.difference
    if one is None or one.found is None or not one.found.served:
        return None
    served = one.found.served[-1][1:]
    steps = [
        step
        for step, line, _ in evidence.whole.steps()
        if line.kind == "step" and line.served and line.served[-1][1:] == served
    ]
    begins = _epochs(evidence.whole, one.found.served[-1][0])
    if steps and steps[0] < one.step and _place(steps[0], begins) == _place(one.step, begins):
        return Cause(
            "reused-seed",
            f"At step {one.step} the batch of step {steps[0]} was served, which has the same place "
            "in an earlier epoch: the shuffling starts again with the seed of that epoch.",
            "Save the position and the generator of the sampler, or seed it with (seed, epoch): "
            "CFIterator does both.",
        )
    if steps:
        return Cause(
            "position",
            f"At step {one.step} the batch of step {steps[0]} was served: the position in the data "
            f"is off by {steps[0] - one.step:+d} batches.",
            "Count the batches that were used for updates, not those that were fetched or counted "
            "anew in each process; CFIterator saves the position.",
        )
    return Cause(
        "other-order",
        f"At step {one.step} a batch was served that the uninterrupted run never had: the order "
        "after a restore is another one, or the samples are made up in another way.",
        "Save the state of the generator that shuffles and augments, or let it depend on (seed, "
        "epoch, sample) alone: CFIterator does.",
    )


def _epochs(whole: Record, loader: str) -> list[int]:
    """The steps at which an epoch begins: where its loader is started."""
    return [1] + [
        line.step for line in whole.lines if any(start[0] == loader for start in line.starts)
    ]


def _place(step: int, begins: list[int]) -> int:
    return step - max(begin for begin in begins if begin <= step)


def _contents(evidence: Evidence) -> Cause | None:
    values = evidence.values()
    if seeded := _seeds(evidence):
        return Cause(
            "seed-in-dataset",
            "The samples are the same, what is made of them is not: the dataset seeds a global "
            f"generator, {seeded}.",
            "Never seed a global generator in a dataset: CFIterator seeds them for each sample. A "
            "generator of your own, seeded with (seed, epoch, index), does no harm.",
        )
    for name, (expected, found) in values.items():
        is_generator = expected.startswith(("torch.Generator", "random.Random", "numpy "))
        if is_generator or ".dataset." in f".{name}" or "transform" in name:
            kind = "a generator of its own" if is_generator else f"{found} instead of {expected}"
            return Cause(
                "stateful-augmentation",
                f"The samples are the same, what is made of them is not: `{name}` ({kind}) starts "
                "anew in each process.",
                "Draw augmentations from the global generators, which CFIterator seeds for each "
                "sample, or seed your own with (seed, epoch, index) for each sample.",
            )
    return Cause(
        "unseeded-augmentation",
        "The samples are the same, what is made of them is not: the dataset keeps a state, or "
        "draws from a generator that is not restored.",
        "Let a sample depend on (seed, epoch, index) alone.",
    )


# ---- counted anew in each process


def _batch_index(evidence: Evidence) -> str:
    """The name of a whole number that is counted in each process; "" if there is none."""
    both = {**evidence.values_after(), **evidence.values()}
    for name, (expected, found) in both.items():
        if _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(found) and int(expected) > int(found):
            return name
    return ""


def _named_index(evidence: Evidence) -> str:
    """What a sentence about an index ends with, if its name is known."""
    index = _batch_index(evidence)
    return f": `{index}` is counted from 0 in each process" if index else ""


_NUMBER = re.compile(r"\d{1,15}")
_ENUMERATE = (
    "Python's enumerate() starts at 0 in a resumed epoch: use train_loader.enumerate() or "
    "train_loader.batch, which go on; or a counter that is tracked."
)


def _accumulation(evidence: Evidence) -> Cause | None:
    if not evidence.has(What.NUM_BATCHES):
        return None
    item = next(i for i in evidence.items if i.what is What.NUM_BATCHES)
    return Cause(
        "accumulation-by-enumerate",
        f"A weight update used {item.found} batches instead of {item.expected}: gradients are "
        f"accumulated by an index that starts anew after a restore{_named_index(evidence)}.",
        _ENUMERATE,
    )


def _learning_rate(evidence: Evidence) -> Cause | None:
    item = next((i for i in evidence.items if i.what is What.SETTING), None)
    if item is None or any(evidence.untracked()):
        return None
    return Cause(
        "lr-from-batch-index",
        f"{item.name} is {item.found} instead of {item.expected}, and no scheduler sets it: it is "
        f"computed from an index that starts anew after a restore{_named_index(evidence)}.",
        f"{_ENUMERATE} Better, use a scheduler, and track it.",
    )


# ---- generators


def _seeds(evidence: Evidence) -> str:
    """What was seeded in one run alone."""
    one = evidence.difference
    if one is None or one.expected is None or one.found is None:
        return ""
    for place in _extra(one.found.seeds, one.expected.seeds):
        where = f"{place[0]} was called at {place[1]}"
        return f"{where}, and not at step {one.step} of an uninterrupted run"
    return ""


def _extra(more: tuple[object, ...], fewer: tuple[object, ...]) -> Iterator[tuple[str, str]]:
    there = [repr(one) for one in fewer]
    for one in more:
        if repr(one) in there:
            there.remove(repr(one))
        elif isinstance(one, list):
            yield str(one[0]), str(one[1])


def _seeded_again(evidence: Evidence) -> Cause | None:
    said = _seeds(evidence)
    if not said or not evidence.has(What.GENERATOR, What.LOSS, What.SAMPLES):
        return None
    return Cause(
        "seeded-again",
        f"{said}: the random numbers of training start again there.",
        "Seed once, when the script starts and before restore(); never in a dataset, and not in "
        "each epoch. A generator of your own is right where numbers must repeat.",
    )


def _loader_draws(evidence: Evidence) -> Cause | None:
    one = evidence.difference
    if one is None or one.expected is None or one.found is None:
        return None
    if not evidence.has(What.GENERATOR):
        return None
    drawing = [_drawing(line) for line in (one.expected, one.found)]
    if drawing[0] == drawing[1]:
        return None
    name = next(iter({*drawing[0]} ^ {*drawing[1]}), ("a loader", ""))
    runs = "the resumed run and not in" if name in drawing[1] else "the uninterrupted run and not"
    return Cause(
        "loader-draws",
        f"Starting {name[0]} at {name[1]} draws from torch's global generator in {runs} the other: "
        "with persistent workers, only the first start of a process draws.",
        "Put validation under `with isolated_rng():`, or give that loader a generator of its own: "
        "DataLoader(..., generator=torch.Generator()).",
    )


def _drawing(line: Line) -> tuple[tuple[str, str], ...]:
    return tuple((start[0], start[1]) for start in line.starts if start[2])


def _generator(evidence: Evidence) -> Cause | None:
    item = next((i for i in evidence.items if i.what is What.GENERATOR), None)
    if item is None or evidence.has(What.SAMPLES, What.LOSS, What.SETTING, What.NUM_BATCHES):
        return None
    return Cause(
        "generator",
        f"{item.name} has drawn another number of times: code between the restore and this "
        "boundary draws in a resumed process and not in one that went on, or the reverse.",
        "Put what need not be repeated (validation, logging) under `with isolated_rng():`.",
    )


# ---- the rest


def _variable(evidence: Evidence) -> Cause | None:
    values = evidence.values()
    if not values or evidence.difference is None:
        return None
    shown = [f"`{name}` ({found} instead of {one})" for name, (one, found) in values.items()]
    return Cause(
        "untracked-variable",
        f"Variables of the script that no checkpoint restores: {', '.join(shown[:4])}"
        f"{', ...' if len(shown) > 4 else ''}.",
        "If training depends on one of them, track it: a dict is restored in place.",
    )


def _kernel(evidence: Evidence) -> Cause | None:
    if evidence.has(What.SAMPLES, What.GENERATOR, What.SETTING, What.NUM_BATCHES, What.OBJECT):
        return None
    if not evidence.has(What.TENSOR, What.LOSS) or evidence.not_restored():
        return None
    return Cause(
        "non-deterministic-kernel",
        "Batch, generators and settings are the same, and so was the state that was restored: what "
        "is computed from them is not. A kernel may add in another order in each process.",
        "torch.use_deterministic_algorithms(True); the same number of threads; "
        "torch.backends.cudnn.benchmark = False.",
    )


RULES: tuple[Rule, ...] = (
    _unreadable,
    _lost_all,
    _torn_copy,
    _untracked,
    _accumulation,
    _position,
    _learning_rate,
    _seeded_again,
    _loader_draws,
    _generator,
    _variable,
    _kernel,
)


def why_not_deterministic(difference: Difference) -> Cause:
    """Why two uninterrupted runs differ."""
    one = difference
    begins = one.before, one.begin
    if begins[0] is not None and begins[1] is not None:
        at_begin = [*changes(begins[0][1], begins[1][1])]
        if any(item.what is What.GENERATOR for item in at_begin):
            return Cause(
                "unseeded",
                "The random generators are not seeded: they differ before the first iteration.",
                "torch.manual_seed(0), and random.seed, numpy.random.seed if they are used, at the "
                "start of the script.",
            )
        if at_begin:
            return Cause(
                "unseeded",
                f"{at_begin[0].name} differs before the first iteration.",
                "Seed before the model is made.",
            )
    if one.first.what is What.SAMPLES:
        return Cause(
            "unseeded-data",
            f"The data differs ({one.first.name}): a shuffle or an augmentation is not seeded.",
            "Seed it, or use CFIterator, which seeds each sample.",
        )
    return Cause(
        "non-deterministic-kernel",
        f"{one.first.name} differs although batches and generators were the same: a kernel, a "
        "thread or the time of day has a say.",
        "torch.use_deterministic_algorithms(True); torch.backends.cudnn.benchmark = False.",
    )
