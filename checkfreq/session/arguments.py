"""The arguments of CFManager: checked, on every rank, before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from checkfreq.config import CFConfig
from checkfreq.mirror.settings import Mirror, open_store
from checkfreq.persist.client import require_no_other_manager
from checkfreq.policy.cadence import ManualCadence
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.retention import RetentionPolicy
from checkfreq.run.checks import cadence, check_arguments, usable
from checkfreq.run.interrupt import StopNotice
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.store.fileops import user_path
from checkfreq.types import CFMode, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What the user passed to CFManager, which documents each of them."""

    chk_dir: str | bytes | os.PathLike[str]
    chk: CFCheckpoint
    mode: CFMode
    chk_freq: int | None
    max_overhead: float
    dynamic: bool
    mtbf_s: float | None
    retention: RetentionPolicy
    tolerate_failures: int | None
    fresh: bool
    config: CFConfig

    def common(self) -> dict[str, Json]:
        """The settings that every rank must have been given alike."""
        return {
            "mode": self.mode,
            "chk_freq": self.chk_freq,
            "fresh": self.fresh,
            "dynamic": self.dynamic,
            "tracked": list(self.chk.tracked),
        }

    def checked(self) -> Checked:
        """Check every argument and make the directory; ConfigError says what is wrong."""
        manual = cadence(self.mode, self.chk_freq)
        check_arguments(self.chk, tolerate_failures=self.tolerate_failures)
        policy = FrequencyPolicy(
            max_overhead=self.max_overhead,
            mtbf_s=self.mtbf_s,
            objective=self.config.objective,
            num_slots=self.config.num_slots,
        )
        if (mirror := Mirror.of(self.config.mirror)) is not None:
            open_store(mirror)  # refuses what cannot work; nothing is sent
        notice = StopNotice(self.config.stop_signals)
        chk_dir = usable(user_path(self.chk_dir))
        require_no_other_manager(chk_dir)
        return Checked(chk_dir, manual, policy, notice)


@dataclass(frozen=True, slots=True)
class Checked:
    """What valid arguments yield. ``cadence`` is None in AUTO, where the policy decides."""

    chk_dir: Path
    cadence: ManualCadence | None
    policy: FrequencyPolicy
    notice: StopNotice
