"""What ranks compare of their state: its structure, and the values that must be equal on all.

`ranks.voting` and `ranks.comparison` ask; this rank answers. Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from checkfreq.snapshot.backends import backend_of
from checkfreq.snapshot.digests import (
    ValueDigests,
    broadcast_anywhere,
    digest_values,
    samples,
    structure_digest,
    structure_listing,
)
from checkfreq.state.capture import read_local_state
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState, LocalState


class Replicas:
    """Digests and listings of this rank's state.

    ``capture`` reads the state of the current boundary; ``num_layouts`` counts how often the state
    was laid out anew, which happens when its structure changes.
    """

    def __init__(
        self,
        chk: CFCheckpoint,
        *,
        capture: Callable[[], CapturedState],
        num_layouts: Callable[[], int],
    ) -> None:
        self._chk = chk
        self._capture = capture
        self._num_layouts = num_layouts
        self._num_layouts_compared = 0
        self._digests: ValueDigests | None = None

    # ---- structure

    @property
    def is_restructured(self) -> bool:
        """Whether the structure may have changed since its digest was last taken."""
        return self._num_layouts() != self._num_layouts_compared

    def structure_digest(self) -> str:
        """Equal on ranks whose state has the same structure."""
        self._num_layouts_compared = self._num_layouts()
        return structure_digest(self._capture())

    def structure_listing(self) -> dict[str, str]:
        """The structure of the state in words, by name."""
        return structure_listing(self._capture())

    # ---- values

    def digest_values(self) -> None:
        """Start digesting, as of this boundary, the values that must be equal on all ranks."""
        modules = [value for value in self._chk.tracked.values() if isinstance(value, nn.Module)]
        local = self._local_state()
        device = backend_of([ref.tensor.device for ref in local.refs])
        self._digests = digest_values(local, modules, device)

    def values_digest(self) -> str | None:
        """The digest of all values; None while devices are still computing."""
        return self._taken.digest()

    def values_listing(self) -> dict[str, str]:
        """The digest of each value, without buffers that an untracked wrapper broadcasts."""
        left_out = broadcast_anywhere(self._local_state())
        return {name: text for name, text in self._taken.found.items() if name not in left_out}

    def weights(self) -> Collection[str]:
        """Names of the state that only a weight update changes."""
        return self._taken.weights

    def samples(self, names: Collection[str]) -> dict[str, list[float]]:
        """A few evenly spaced numbers of each of these tensors, as they are now."""
        return samples(self._local_state(), names)

    @property
    def _taken(self) -> ValueDigests:
        assert self._digests is not None
        return self._digests

    def _local_state(self) -> LocalState:
        """The whole state of this rank; chooses no engine, so that it works before training."""
        return read_local_state(self._chk, positions={})
