"""What the mirror's thread reports to the trainer: its state, and what lies in the store."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from checkfreq.types import Json


class State(enum.Enum):
    """What a mirror is doing."""

    STARTING = "starting"
    IDLE = "idle"
    UPLOADING = "uploading"
    #: Another run's claim may be alive, or an earlier worker of this directory is still uploading.
    WAITING = "waiting"
    #: The last request failed; tried again at growing pauses.
    FAILING = "failing"
    #: Another run writes there. Nothing is uploaded.
    REFUSED = "refused"
    #: The mirror's thread has ended.
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A checkpoint in the mirror, as a retention policy sees it."""

    step: int
    keep: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    created_s: float = 0.0
    num_bytes: int = 0
    at_epoch_end: bool = False


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """One report.

    step: being uploaded, or the last that was. began_s, ended_s: when that upload began and ended,
    by the machine's monotonic clock. uploaded_step: the newest in the mirror. upload_s: how long
    an upload takes, as measured lately. problem: why it fails, waits or is refused, and since_s
    (Unix time) since when. held: steps that local retention leaves alone for it. damaged: an
    object that is not what was sent, and is sent again.
    """

    state: State
    step: int | None = None
    began_s: float | None = None
    ended_s: float | None = None
    sent_bytes: int = 0
    uploaded_step: int | None = None
    num_uploaded: int = 0
    upload_s: float = 0.0
    problem: str = ""
    since_s: float = 0.0
    held: tuple[int, ...] = ()
    damaged: str = ""
    checkpoints: tuple[Mirrored, ...] = ()

    def to_json(self) -> Json:
        """As sent to the trainer."""
        return {**dataclasses.asdict(self), "state": self.state.value}

    @staticmethod
    def from_json(value: Json) -> MirrorReport:
        """The inverse of `to_json`."""
        fields = dict(value)
        fields["state"] = State(fields["state"])
        fields["held"] = tuple(fields["held"])
        fields["checkpoints"] = tuple(Mirrored(**one) for one in fields["checkpoints"])
        return MirrorReport(**fields)
