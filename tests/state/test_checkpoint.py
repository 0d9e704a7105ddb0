"""CFCheckpoint accepts what can be kept and refuses the rest when it is constructed."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from checkfreq.errors import StateError
from checkfreq.state.checkpoint import CFCheckpoint


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "None"), ((1,), "a builtins.tuple"), (nn.Linear, "the class Linear")],
)
def test_an_object_without_state_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(StateError, match=rf"CFCheckpoint\(thing=\.\.\.\): {words} has no state"):
        CFCheckpoint(thing=value)


def test_a_name_that_cannot_be_a_file_is_refused() -> None:
    with pytest.raises(StateError, match="'a/b' cannot name a file"):
        CFCheckpoint(**{"a/b": {}})
