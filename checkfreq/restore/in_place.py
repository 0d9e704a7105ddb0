"""One restore into live objects, over as many checkpoints as it takes to find one without damage.

Order for each: compare, and read what needs memory of its own (``look``: nothing has changed);
then user code, which is undone if anything fails (``load``); then all other tensors, in place
(``stream``); then what cannot fail (``finish``). Damage that ``stream`` finds leaves parts of that
checkpoint in live tensors, until an older one is loaded over them. If none can be, the objects are
spoiled: the error says so, and nothing may be done with them but to make them anew.
"""

from __future__ import annotations

from collections.abc import Callable

from checkfreq.errors import (
    CheckFreqError,
    CorruptCheckpointError,
    StateError,
    StorageError,
)
from checkfreq.restore.apply import RestorePlan
from checkfreq.restore.found import FoundCheckpoint


class InPlace:
    """Loads a checkpoint, or an older one; used by one thread at a time.

    ``compare`` makes the plan. ``set_positions`` moves the iterators and returns what undoes it.
    ``require_memory`` is told how many bytes are needed besides the live objects, and may raise.
    ``verifies``: read everything once before anything changes.
    """

    def __init__(
        self,
        compare: Callable[[FoundCheckpoint], RestorePlan],
        *,
        set_positions: Callable[[RestorePlan], Callable[[], None]] | None = None,
        require_memory: Callable[[int], None] = lambda num_bytes: None,
        verifies: bool = False,
    ) -> None:
        self._compare = compare
        self._set_positions = set_positions
        self._require_memory = require_memory
        self._verifies = verifies
        self._undo: list[Callable[[], None]] = []
        self._step = 0
        #: Live tensors that may hold parts of checkpoints, and the steps of those.
        self._parts: set[str] = set()
        self._steps: list[int] = []

    def look(self, found: FoundCheckpoint) -> RestorePlan:
        """Compare and fetch, for a single rank."""
        plan = self.compare(found)
        self.fetch(found, plan)
        return plan

    def compare(self, found: FoundCheckpoint) -> RestorePlan:
        """What there is to do. Changes nothing."""
        self._step = found.step
        return self._compare(found)

    def fetch(self, found: FoundCheckpoint, plan: RestorePlan) -> None:
        """Read what needs memory of its own. Changes nothing."""
        self._require_memory(plan.new_bytes)
        if self._verifies:
            found.reader.verify(found.files)
        plan.fetch()

    def change(self, plan: RestorePlan) -> None:
        """All of the rest, for a single rank."""
        self.load(plan)
        try:
            self.stream(plan)
        except (CorruptCheckpointError, OSError):
            self.take_back()
            raise
        self.finish(plan)

    def load(self, plan: RestorePlan) -> None:
        """Run the user code; undone if it raises."""
        try:
            if self._set_positions is not None:
                self._undo.append(self._set_positions(plan))
            self._undo.append(plan.load())
        except BaseException:
            self.take_back()
            raise

    def take_back(self) -> None:
        """Undo ``load``."""
        while self._undo:
            self._undo.pop()()

    def stream(self, plan: RestorePlan) -> None:
        """Read the tensors into their places."""
        if plan.filled:
            self._parts |= plan.filled
            if self._step not in self._steps:  # it is read twice if it failed before the opening
                self._steps.append(self._step)
        plan.stream()

    def finish(self, plan: RestorePlan) -> None:
        """Set what is left. StateError if parts of a damaged checkpoint remain elsewhere."""
        if left := sorted(self._parts - plan.filled):
            names = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
            raise StateError(f"step {self._step} does not hold {names}")
        plan.finish()
        self._undo.clear()
        self._parts.clear()
        self._steps.clear()

    @property
    def spoiled(self) -> str:
        """What the live objects hold now that must not be used; "" if they are whole."""
        if not self._steps:
            return ""
        many = "s" if len(self._steps) > 1 else ""
        which = f"step{many} {', '.join(map(str, self._steps))}"
        return f"live objects hold parts of {which}, of which not all could be loaded"

    def told(self, error: BaseException) -> BaseException:
        """``error``, which ended the restore, saying so if live objects are spoiled."""
        if not self.spoiled or not isinstance(error, CheckFreqError):
            return error
        text = f"{self.spoiled}: make them anew, best in a new process, and restore again"
        if isinstance(error, CorruptCheckpointError):
            got = f"{error.got}; {text}"
            return CorruptCheckpointError(
                error.path, check=error.check, expected=error.expected, got=got
            )
        if isinstance(error, StorageError):
            return StorageError(error.errno, f"{error.strerror}; {text}", error.filename)
        return StateError(f"{error}; {text}")
