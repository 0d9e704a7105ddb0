"""Events told as a story, one sentence each; many checkpoints in a row as one. Pure.

Events come from a file that may hold anything: what is of a wrong type counts as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from checkfreq.story.facts import done_again
from checkfreq.story.model import Loss, Story
from checkfreq.types import size_text

Event = Mapping[str, Any]

#: So many checkpoints in a row are told one by one.
_FEW = 3
#: A cost that changed by less explains nothing.
_LEAST_CHANGE = 0.1
#: Longest text of an event, in characters.
_MOST_TEXT = 500
#: What a plan depends on, as an event names it, and in words.
_DRIVERS = {
    "cost_s": "a checkpoint adds",
    "iteration_s": "an iteration takes",
    "durable_s": "a checkpoint is durable after",
    "mtbf_s": "time between failures is",
}
#: What is ordinary while a run trains, and told together.
_ORDINARY = frozenset(("committed", "deferred", "pruned", "uploaded"))


class Teller:
    """Takes events in their order, and tells them."""

    def __init__(self) -> None:
        self.story = Story()
        self._plan: Event = {}

    def tell(self, event: Event) -> tuple[int, bool, str]:
        """The number of the run that an event belongs to, whether that is a new one, and a text."""
        known = len(self.story.runs)
        self.story.add(event)
        is_new = len(self.story.runs) > known
        if is_new:
            self._plan = {}
        return len(self.story.runs), is_new, self._sentence(event)

    def _sentence(self, event: Event) -> str:
        kind = _text(event, "kind")
        match kind:
            case "committed":
                return _committed(event)
            case "plan":
                return self._planned(event)
            case "restored":
                return self._restored(event)
            case "began":
                return _began(event)
            case "pruned":
                steps = ", ".join(map(str, _list(event, "steps")))
                return f"removed, as retention says: steps {steps}"[:_MOST_TEXT]
        said = _SENTENCES.get(kind)
        if said is None:
            return f"{kind or 'an event of no kind'} (step {_step(event)}){_rest(event)}"
        values = {name: value for name, value in event.items() if isinstance(name, str)}
        return said.format_map(_Values(values)).rstrip(": ")[:_MOST_TEXT]

    def _planned(self, event: Event) -> str:
        explanation = _text(event, "explanation") or f"every {event.get('interval_steps')}"
        before, self._plan = self._plan, event
        was = before.get("interval_steps")
        changes = [*_changes(before, event)] if was else []
        because = f"; it was every {was}: {', '.join(changes)}" if changes else ""
        because = because or (f"; it was every {was}" if was else "")
        return f"from step {_step(event)} on checkpoints {explanation}{because}"

    def _restored(self, event: Event) -> str:
        said = (
            f"training goes on from step {_step(event)} ({_text(event, 'source') or 'directory'})"
        )
        skipped = _number(event, "steps_lost")
        if skipped:
            said += f"; newer ones did not validate, {skipped:.0f} step(s) back"
        run = self.story.run
        loss = None if run is None else self.story.loss(run)
        if run is None or loss is None:
            return said
        return said + _lost(loss, self.story.down_s(run))


class Ordinary:
    """Ordinary events in a row, which become one line if there are many."""

    def __init__(self) -> None:
        self._events: list[tuple[Event, str]] = []

    def takes(self, event: Event) -> bool:
        """Whether the event is an ordinary one."""
        return _text(event, "kind") in _ORDINARY

    def add(self, event: Event, sentence: str) -> None:
        """Keep an event that is to be told later."""
        self._events.append((event, sentence))

    def told(self) -> Iterator[tuple[float, str]]:
        """The time and the text of each line, once the row has ended."""
        events, self._events = self._events, []
        saves = [event for event, _ in events if event.get("kind") == "committed"]
        if len(saves) <= _FEW:
            yield from ((_number(event, "time_unix_s"), said) for event, said in events)
            return
        steps = [_step(event) for event in saves]
        num_bytes = sum(
            _number(event, "num_bytes") - _number(event, "linked_bytes") for event in saves
        )
        held_s = sum(_number(event, "stall_s") for event in saves)
        said = (
            f"{len(saves)} checkpoints saved, steps {steps[0]} to {steps[-1]}: "
            f"{size_text(int(num_bytes))}, training held {_seconds(held_s)} in all"
        )
        late = sum(1 for event, _ in events if event.get("kind") == "deferred")
        removed = sum(len(_list(event, "steps")) for event, _ in events)
        sent = sum(1 for event, _ in events if event.get("kind") == "uploaded")
        said += f"; {late} put off" if late else ""
        said += f"; {removed} removed" if removed else ""
        said += f"; {sent} uploaded" if sent else ""
        yield _number(events[-1][0], "time_unix_s"), said


class _Values(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return ""


_SENTENCES = {
    "failed": "step {step} NOT saved: {error}",
    "deferred": "step {step} put off: {why}",
    "quarantined": "step {step} set aside in quarantine/: {reason}",
    "stop": "asked to stop at step {step}: {signal}",
    "notice": "at step {step}: {text}",
    "finished": "the run is finished with step {step}",
    "reopened": "the finished run is opened again at step {step}",
    "worker_died": "the worker died with step {step}; another takes over: {error}",
    "retaken": "the lock was taken again: {message}",
    "killed": "the training process is gone, and had not ended its run: killed, or crashed",
    "memory_kept": "step {step} stays in memory for the next run",
    "memory_given_up": "step {step} is given up in memory: {why}",
    "trouble": "trouble: {message}",
    "ranks differ": "ranks hold different state at step {step}",
    "uploaded": "step {step} is in the mirror",
    "mirror_failing": "the mirror fails: {error}",
    "mirror_refused": "the mirror belongs to another run: {holder}",
    "ended": "at step {step} the run ended: {how}",
}


def _committed(event: Event) -> str:
    said = f"step {_step(event)} saved ({_text(event, 'reason') or 'for its trainer'}): "
    said += size_text(int(_number(event, "num_bytes")))
    linked = int(_number(event, "linked_bytes"))
    said += f", {size_text(linked)} of them linked" if linked else ""
    if "persist_s" in event:
        said += f", written in {_seconds(_number(event, 'persist_s'))}"
    if "stall_s" in event:
        said += f", training held {_seconds(_number(event, 'stall_s'))}"
    if event.get("after_trainer_death") is True:
        said += ", by the worker after the trainer's death"
    return said


def _began(event: Event) -> str:
    said = f"training begins at step {_step(event)}"
    host, world = _text(event, "host"), int(_number(event, "world"))
    said += f" on {host}" if host else ""
    said += f", {world} ranks" if world > 1 else ""
    bound, interval = _number(event, "max_overhead"), _number(event, "interval_steps")
    if interval:
        return f"{said}; every {interval:.0f} iterations, as chosen"
    return f"{said}; checkpoints may add {100 * bound:.3g} %" if bound else said


def _lost(loss: Loss, down_s: float) -> str:
    lost = "nothing lost"
    if loss.most_steps:
        work = f", {_seconds(loss.work_s)} of work" if loss.work_s else ""
        lost = f"lost: {done_again(loss)}{work}"
    return f"; {lost}; {_seconds(down_s)} since the last sign of the run before"


def _changes(before: Event, event: Event) -> Iterator[str]:
    """What a plan depends on and is different now."""
    for name, words in _DRIVERS.items():
        old, new = _number(before, name), _number(event, name)
        if old and new and abs(new - old) > _LEAST_CHANGE * max(old, new):
            yield f"{words} {_seconds(new)} instead of {_seconds(old)}"


def _rest(event: Event) -> str:
    known = ("kind", "step", "time_unix_s")
    rest = [f"{name}={value}" for name, value in event.items() if name not in known]
    return f": {', '.join(rest)}"[:_MOST_TEXT] if rest else ""


def _seconds(seconds: float) -> str:
    """``43 ms``, ``2.5 s``, ``12 min``, ``3.1 h``."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _step(event: Event) -> int:
    value = event.get("step")
    return value if type(value) is int else -1


def _number(event: Event, name: str) -> float:
    value = event.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0.0
    return float(value) if 0 <= value < 1e18 else 0.0


def _text(event: Event, name: str) -> str:
    value = event.get(name)
    return value if isinstance(value, str) else ""


def _list(event: Event, name: str) -> list[Any]:
    value = event.get(name)
    return value if isinstance(value, list) else []
