"""What both modes read off a built DALI iterator: its one pipeline, and what its operators are.

Attributes as of DALI 2.4, most of them without a public name; what only one mode needs is in
``graph`` and ``native_facts``. Nothing of DALI is imported: the objects come from the user.
"""

from __future__ import annotations

from typing import Any

from iterators.errors import NotResumableError

#: What the schemas of operators that run a function of the user's have in their names.
_PYTHON = ("PythonFunction", "NumbaFunc", "JaxFunction")


def sole_pipeline(iterator: Any) -> Any:
    """The one pipeline of an iterator."""
    pipelines = iterator._pipes
    if len(pipelines) != 1:
        raise NotResumableError(
            f"the DALI iterator runs {len(pipelines)} pipelines: start one process for each "
            "device, as DistributedDataParallel does, each with one pipeline whose reader takes "
            "its share (shard_id and num_shards)"
        )
    return pipelines[0]


def schema(operator: Any) -> Any:
    """DALI's description of an operator of a pipeline."""
    return operator._op.schema


def kind(operator: Any) -> str:
    """The name of its schema, ``readers__File`` for example."""
    return str(schema(operator).Name())


def runs_python(operator: Any) -> bool:
    """Whether it runs a function of the user's: DALI declares it stateless, whatever that does."""
    return any(one in kind(operator) for one in _PYTHON)
