"""From symptoms to likely causes: a table of rules, the most specific first.

A rule looks at the first difference, at what was not as it should be right after the restore, and
at what the two runs did up to there. It says what it found, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from checkfreq.crashtest.compare import Difference, Item, Pairs, What, changes
from checkfreq.crashtest.history import Line, Record


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause: a name for programs, what was seen, and what to do."""

    name: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules look at. ``whole``: the record of the rank that differs."""

    difference: Difference
    whole: Record = field(default_factory=Record)

    @property
    def items(self) -> tuple[Item, ...]:
        """What differs at the first boundary that does."""
        return self.difference.items

    def of(self, *kinds: What) -> Item | None:
        """The first thing of these kinds that differs."""
        return next((item for item in self.items if item.what in kinds), None)

    def not_restored(self) -> list[Item]:
        """State that was not right from the start: before anything was trained."""
        one = self.difference
        if one.before is None or one.begin is None:
            return []
        items = changes(one.before[1], one.begin[1])
        return [item for item in items if item.what not in (What.GENERATOR, What.VARIABLE)]

    def not_restored_tensors(self) -> list[str]:
        """Names of the tensors among it."""
        return [item.name for item in self.not_restored() if item.what is What.TENSOR]

    def untracked(self) -> Iterator[tuple[str, str]]:
        """(name, kind) of objects with a state that no checkpoint holds, and that differ."""
        differing = [item.name for item in (*self.not_restored(), *self.items)]
        for name, kind in self.difference.untracked.items():
            of_it = f"{name}."
            if any(one.startswith(of_it) for one in differing) and not self._is_restored(of_it):
                yield name, kind

    def _is_restored(self, prefix: str) -> bool:
        """Whether some of an object came back: it is saved, as scripts without a manager do."""
        one, at_start = self.difference, self.whole.at(0)
        if one.before is None or one.begin is None or at_start is None:
            return False
        first, expected, found = at_start[1], one.before[1], one.begin[1]
        return any(
            name.startswith(prefix) and first.get(name) != text and found.get(name) == text
            for name, text in expected.items()
        )


Rule = Callable[[Evidence], Cause | None]


def likely_causes(evidence: Evidence) -> list[Cause]:
    """What may be behind a difference, the likeliest first."""
    found = (rule(evidence) for rule in RULES)
    causes = [cause for cause in found if cause is not None]
    if not causes and (cause := _variables(evidence)) is not None:
        return [cause]  # beside others they would mislead: most that differ do no harm
    return causes or [_last_resort(evidence)]


def _last_resort(evidence: Evidence) -> Cause:
    wrong = evidence.not_restored_tensors()
    if wrong:
        return Cause(
            "not-restored",
            f"Right after the restore, these are not what they were: {_listed(wrong)}.",
            "Restore after whatever initialises them; checkfreq diff compares two checkpoints.",
        )
    is_computed = {item.what for item in evidence.items} <= {What.TENSOR, What.LOSS}
    return _COMPUTED if is_computed else _UNKNOWN


_COMPUTED = Cause(
    "computed-otherwise",
    "Batch, generators, settings, variables and the state that was restored are the same: what is "
    "computed from them is not. A kernel may add in another order in each process, or where a "
    "tensor lies otherwise in memory.",
    "torch.use_deterministic_algorithms(True); the same number of threads; "
    "torch.backends.cudnn.benchmark = False.",
)
_UNKNOWN = Cause(
    "untracked-state",
    "Training depends on something that no checkpoint holds, and that is in none of the variables "
    "that could be looked at.",
    "Look for state in C++ libraries, in files, on other machines.",
)


# ---- the save


def why_not_resumed(output: str, *, was_torn: bool, was_over: bool) -> Cause:
    """Why a script ends with an error when it is started again. ``output``: the end of it."""
    last = [line for line in output.splitlines() if line.strip()][-1:]
    said = last[0].strip() if last else "no output"
    if was_torn or _TORN.search(output):
        return Cause(
            "non-durable-save",
            "The script was killed in the middle of writing its checkpoint, and could not read "
            f"what was left of it: {said}",
            "Write to another name in the same folder, sync the file, rename it over the old one, "
            "and sync the folder; keep the checkpoint before it. checkfreq.helpers.atomic_save and "
            "CFManager do that.",
        )
    if was_over:
        return Cause(
            "fails-when-done",
            "Killed after its last checkpoint, the script has nothing left to train when it is "
            f"started again, and what follows the loop fails: {said}",
            "Give each variable that is set in the loop, and used after it, a value before the "
            "loop.",
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


def _torn_copy(evidence: Evidence) -> Cause | None:
    """Some of what was restored is right, and the rest is that of another step."""
    one = evidence.difference
    wrong = [item for item in evidence.not_restored() if item.what is What.TENSOR]
    if not wrong:
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
    """The objects that were not restored; optimizers, schedulers and the like before modules."""
    found = sorted(evidence.untracked(), key=lambda one: "torch.nn.modules.module" in one[1])
    if not found:
        return None
    shown = [f"`{name}` ({kind.split()[0].rpartition('.')[2]})" for name, kind in found]
    names = ", ".join(f"{name}={name}" for name, _ in found[:_MOST_SHOWN])
    return Cause(
        "untracked-object",
        f"{_listed(shown)} {'is' if len(shown) == 1 else 'are'} in no checkpoint: after a restore "
        f"{'it starts' if len(shown) == 1 else 'they start'} anew.",
        f"Track it: CFCheckpoint(..., {names}), or save and load its state_dict().",
    )


_MOST_SHOWN = 4


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")


# ---- batches


def _position(evidence: Evidence) -> Cause | None:
    item = evidence.of(What.SAMPLES)
    if item is None:
        return None
    return _contents(evidence) if "of the same samples" in item.name else _other_order(evidence)


def _other_order(evidence: Evidence) -> Cause | None:
    """Which step of the uninterrupted run had the batch that was served."""
    one = evidence.difference
    if one.found is None or not one.found.served:
        return None
    served = one.found.served[-1][1:]
    steps = [
        step
        for step, line, _ in evidence.whole.steps()
        if line.kind in ("step", "passed") and line.served and line.served[-1][1:] == served
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


def _contents(evidence: Evidence) -> Cause:
    if seeded := _seeds(evidence):
        return Cause(
            "seed-in-dataset",
            "The samples are the same, what is made of them is not: the dataset seeds a global "
            f"generator, {seeded}.",
            "Never seed a global generator in a dataset: CFIterator seeds them for each sample. A "
            "generator of your own, seeded with (seed, epoch, index), does no harm.",
        )
    of_data = {
        name: pair
        for name, pair in evidence.difference.variables.items()
        if pair[0].startswith(_GENERATORS) or ".dataset." in f".{name}" or "transform" in name
    }
    what = (
        f"{_variables_text(of_data)} of it start anew in each process"
        if of_data
        else ("the dataset keeps a state, or draws from a generator that is not restored")
    )
    return Cause(
        "stateful-augmentation",
        f"The samples are the same, what is made of them is not: {what}.",
        "Let a sample depend on (seed, epoch, index) alone: draw from the global generators, which "
        "CFIterator seeds for each sample, or seed a generator of your own for each.",
    )


_GENERATORS = ("torch.Generator", "random.Random", "numpy ")


# ---- variables


def _length(evidence: Evidence) -> Cause | None:
    item = evidence.of(What.LENGTH)
    if item is None:
        return None
    found = evidence.difference.variables
    seen = f" ({_variables_text(found)})" if found else ""
    if item.found != "more":
        return Cause(
            "shorter-run",
            f"The resumed run ends after {item.found}, and an uninterrupted one after "
            f"{item.expected}: what ends it is not restored{seen}.",
            "Track what the loop counts or waits for: a dict is restored in place.",
        )
    return Cause(
        "longer-run",
        f"The resumed run goes on beyond the {item.expected} of an uninterrupted one: its loop "
        f"counts epochs or steps anew in each process{seen}.",
        "for epoch in train_loader.epochs(n), or while cf_manager.global_step < n; without them, "
        "range(first_epoch, n) with a first epoch that is saved.",
    )


def _variables(evidence: Evidence) -> Cause | None:
    found = evidence.difference.variables
    if not found or evidence.of(What.LENGTH):
        return None
    flags = {name: pair for name, pair in found.items() if _FLAG.search(name)}
    if flags:
        return Cause(
            "module-flag",
            f"A flag of a module is not what it is in an uninterrupted run: "
            f"{_variables_text(flags)}.",
            "Set it from what is restored, at the beginning of each epoch: model.train() or "
            "model.eval(), and parameter.requires_grad_(...).",
        )
    enumerates = (
        " Python's enumerate() starts at 0 in a resumed epoch: use train_loader.enumerate() or "
        "train_loader.batch, which go on."
        if any(_is_counter(*pair) for pair in found.values())
        else ""
    )
    return Cause(
        "untracked-variable",
        f"Where training goes on after a restore, these variables are not what they are in an "
        f"uninterrupted run: {_variables_text(found)}.",
        "Track what training depends on: a dict is restored in place, and an object with "
        f"state_dict() and load_state_dict() too.{enumerates}",
    )


_FLAG = re.compile(r"\.(training|requires_grad)$")
_NUMBER = re.compile(r"\d{1,15}")


def _is_counter(expected: str, found: str) -> bool:
    """Whether a whole number may be counted anew in each process."""
    both = _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(found)
    return bool(both) and int(expected) > int(found)


def _variables_text(variables: Pairs) -> str:
    """Tensors and generators first, then what the script's own variables hold directly."""

    def weight(name: str) -> tuple[bool, int, str]:
        return not _is_digest(variables[name][0]), name.count("."), name

    shown = []
    for name in sorted(variables, key=weight):
        expected, found = variables[name]
        is_told = _is_digest(expected) or len(expected) + len(found) > 60
        shown.append(f"`{name}`" if is_told else f"`{name}` ({found} instead of {expected})")
    return _listed(shown)


def _is_digest(text: str) -> bool:
    return text.startswith(_GENERATORS) or "[" in text.partition(" ")[0]


# ---- generators


def _seeds(evidence: Evidence) -> str:
    """What was seeded in one run alone."""
    one = evidence.difference
    if one.expected is None or one.found is None:
        return ""
    for call, place in _extra(one.found.seeds, one.expected.seeds):
        return f"{call} was called at {place}, and not at step {one.step} of an uninterrupted run"
    return ""


def _extra(more: Sequence[object], fewer: Sequence[object]) -> Iterator[tuple[str, str]]:
    there = [repr(one) for one in fewer]
    for one in more:
        if repr(one) in there:
            there.remove(repr(one))
        elif isinstance(one, list):
            yield str(one[0]), str(one[1])


def _seeded_again(evidence: Evidence) -> Cause | None:
    said = _seeds(evidence)
    if not said or not evidence.of(What.GENERATOR, What.LOSS, What.SAMPLES):
        return None
    return Cause(
        "seeded-again",
        f"{said}: the random numbers of training start again there.",
        "Seed once, when the script starts and before restore(); never in a dataset, and not in "
        "each epoch. A generator of your own is right where numbers must repeat.",
    )


def _loader_draws(evidence: Evidence) -> Cause | None:
    one = evidence.difference
    if one.expected is None or one.found is None or not evidence.of(What.GENERATOR):
        return None
    drawing = [_drawing(line) for line in (one.expected, one.found)]
    if drawing[0] == drawing[1]:
        return None
    name = next(iter({*drawing[0]} ^ {*drawing[1]}), ("a loader", ""))
    runs = "the resumed run and not in" if name in drawing[1] else "the uninterrupted run and not"
    place = f" at {name[1]}" if name[1] else ""
    return Cause(
        "loader-draws",
        f"Starting {name[0]}{place} draws from torch's global generator in {runs} the other: "
        "with persistent workers, only the first start of a process draws.",
        "Put validation under `with isolated_rng():`, or give that loader a generator of its own: "
        "DataLoader(..., generator=torch.Generator()).",
    )


def _drawing(line: Line) -> tuple[tuple[str, str], ...]:
    return tuple((start[0], start[1]) for start in line.starts if start[2])


def _generator(evidence: Evidence) -> Cause | None:
    item = evidence.of(What.GENERATOR)
    others = (What.SAMPLES, What.LOSS, What.SETTING, What.BATCHES, What.BACKWARDS)
    if item is None or evidence.of(*others) or evidence.difference.variables:
        return None
    return Cause(
        "generator",
        f"{item.name} has drawn another number of times: code between the restore and this "
        "boundary draws in a resumed process and not in one that went on, or the reverse.",
        "Put what need not be repeated (validation, logging) under `with isolated_rng():`.",
    )


RULES: tuple[Rule, ...] = (
    _torn_copy,
    _untracked,
    _position,
    _length,
    _seeded_again,
    _loader_draws,
    _generator,
)


def why_not_deterministic(evidence: Evidence, *, is_by_hash: bool) -> list[Cause]:
    """Why two uninterrupted runs differ. ``is_by_hash``: they do not with the same hash seed."""
    one = evidence.difference
    if is_by_hash:
        return [
            Cause(
                "hash-seed",
                f"{_first(one)} differs with Python's hash seed, which is another one in each "
                "process: the script depends on the order of a set, or on hash().",
                "sorted(...) where a set is iterated over; hashlib instead of hash().",
            )
        ]
    if names := evidence.not_restored_tensors() or _drawn(evidence):
        return [
            Cause(
                "unseeded",
                f"Before the first iteration these differed already: {_listed(names)}.",
                "torch.manual_seed(0), and random.seed, numpy.random.seed if they are used, at the "
                "start of the script, before the model is made.",
            )
        ]
    if one.first.what is What.SAMPLES:
        return [
            Cause(
                "unseeded-data",
                f"The data differs ({one.first.name}): a shuffle or an augmentation is not seeded.",
                "Seed it, or use CFIterator, which seeds each sample.",
            )
        ]
    return _clock_or_kernel(one)


def _drawn(evidence: Evidence) -> list[str]:
    """Generators that were not the same from the start, and that training draws from."""
    one, then = evidence.difference, evidence.whole.at(evidence.difference.step)
    if one.before is None or one.begin is None:
        return []
    started = one.before[1]
    return [
        item.name
        for item in changes(started, one.begin[1])
        if item.what is What.GENERATOR
        and (then is None or then[1].get(item.name) != started[item.name])
    ]


def _clock_or_kernel(one: Difference) -> list[Cause]:
    numbers = {n: pair for n, pair in one.variables.items() if all(map(_REAL.fullmatch, pair))}
    clock = Cause(
        "clock",
        f"{_first(one)} differs although batches and generators were the same: something that "
        f"is another in each process has a say, as a clock is"
        f"{': ' + _variables_text(numbers) if numbers else ''}.",
        "Compute it from what is tracked: cf_manager.global_step, the epoch, a scheduler.",
    )
    kernel = Cause(
        "non-deterministic-kernel",
        f"{_first(one)} differs although batches, generators and settings were the same: a kernel "
        "or a thread may add in another order each time.",
        "torch.use_deterministic_algorithms(True); torch.backends.cudnn.benchmark = False.",
    )
    if one.first.what is What.SETTING:
        return [clock]
    return [clock, kernel] if numbers else [kernel, clock]


_REAL = re.compile(r"-?\d+\.\d*(e[+-]?\d+)?")


def _first(one: Difference) -> str:
    text = one.first.subject
    return f"{text[0].upper()}{text[1:]}"
