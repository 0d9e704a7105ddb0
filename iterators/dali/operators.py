"""What both modes read from a built DALI iterator: its only pipeline, and the operators in it.

Uses attributes of DALI 2.4, most of them private. What only one mode needs is in ``graph`` and
``native_facts``. DALI is not imported here: the objects come from the user.
"""

from __future__ import annotations

from typing import Any

from iterators.errors import NotResumableError

#: Parts of the schema names of operators that run a Python function of the user.
_PYTHON = ("PythonFunction", "NumbaFunc", "JaxFunction")


def sole_pipeline(iterator: Any) -> Any:
    """The only pipeline of an iterator; ``NotResumableError`` if it has several."""
    pipelines = iterator._pipes
    if len(pipelines) != 1:
        raise NotResumableError(
            f"the DALI iterator runs {len(pipelines)} pipelines: start one process per device, as "
            "DistributedDataParallel does, each with one pipeline whose reader takes its share "
            "(shard_id and num_shards)"
        )
    return pipelines[0]


def schema(operator: Any) -> Any:
    """DALI's description of an operator of a pipeline."""
    return operator._op.schema


def kind(operator: Any) -> str:
    """The name of the operator's schema, for example ``readers__File``."""
    return str(schema(operator).Name())


def runs_python(operator: Any) -> bool:
    """Whether the operator runs the user's Python code, which DALI declares stateless anyway."""
    return any(one in kind(operator) for one in _PYTHON)
