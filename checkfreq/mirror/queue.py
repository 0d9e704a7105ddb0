"""Which checkpoint is uploaded next: the newest, at the mirror's own pace. Pure.

Times are seconds of one clock. A checkpoint that is superseded before its turn comes is skipped,
unless it is pinned. What is wanted and not uploaded yet is held: local retention must not remove
the only copy of it.
"""

from __future__ import annotations

from collections.abc import Collection

#: After an upload nothing is sent for so long, and for this part of its time: iterations without
#: an upload must be seen now and then, or what uploading costs could not be measured.
_REST_S = 1.0
_REST_PART = 0.1


class UploadQueue:
    """The steps that are to be uploaded."""

    def __init__(self, *, every_s: float | None) -> None:
        self._every_s = every_s or 0.0
        self._newest: int | None = None
        self._pinned: set[int] = set()
        self._allowed_s: float | None = None
        self._current: int | None = None
        self._hurries = False
        self._after = -1

    # ---- what happens

    def committed(self, step: int, *, set_aside_after: int | None = None) -> None:
        """``step`` is durable, and the newest; later ones than ``set_aside_after`` are gone."""
        if set_aside_after is not None:
            self._pinned = {one for one in self._pinned if one <= set_aside_after}
        self._newest = step if step > self._after else None

    def only_after(self, step: int) -> None:
        """Steps up to this one are another run's, and stay as they are."""
        self._after = step
        self._newest = None if self._newest is not None and self._newest <= step else self._newest
        self.pinned(())

    def pinned(self, steps: Collection[int]) -> None:
        """These are to be uploaded too, although there are newer ones."""
        self._pinned = {step for step in self._pinned.union(steps) if step > self._after}

    def begin(self, step: int, *, now_s: float) -> None:
        """The upload of ``step`` begins."""
        self._current = step
        self._allowed_s = now_s + self._every_s

    def ended(self, *, now_s: float, seconds: float) -> None:
        """The current step is uploaded, in ``seconds``."""
        step, self._current = self._current, None
        if self._newest == step:
            self._newest = None
        self._pinned.discard(-1 if step is None else step)
        rest_s = max(_REST_S, _REST_PART * seconds)
        self._allowed_s = max(self._allowed_s or now_s, now_s + rest_s)

    def failed(self) -> None:
        """The upload did not succeed: the newest step that there is then comes next."""
        self._current = None
        self._allowed_s = None

    def forget(self, step: int) -> None:
        """The step is gone, or damaged."""
        self._pinned.discard(step)
        if self._newest == step:
            self._newest = None

    def hurry(self) -> None:
        """The run ends: no pauses from now on, and only the newest step matters."""
        self._hurries = True
        self._pinned.clear()

    # ---- what follows

    @property
    def next_step(self) -> int | None:
        """The step to upload when it is time; None if there is none."""
        if self._newest is not None:
            return self._newest
        return max(self._pinned, default=None)

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next upload may begin."""
        if self._allowed_s is None or self._hurries:
            return 0.0
        return max(0.0, self._allowed_s - now_s)

    @property
    def is_overtaken(self) -> bool:
        """Whether the current upload is not worth finishing: the run ends with a newer step."""
        return self._hurries and self._newest is not None and self._newest != self._current

    def held(self) -> frozenset[int]:
        """Steps of which the mirror has no copy yet, and wants one."""
        wanted = {self._current, self._newest, *self._pinned}
        return frozenset(step for step in wanted if step is not None)
