"""What ``DALILoader`` reads from a built DALI iterator and its pipeline, and what it refuses.

That is: the operators of the pipeline, the outputs that come directly from our reader, and the
number of prefetched batches that were not handed out yet. Uses private attributes of DALI 2.4, as
``operators`` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from iterators.dali.operators import kind, runs_python, schema
from iterators.dali.source import IndexedSource
from iterators.errors import NotResumableError

_USE_OURS = (
    "Use iterators.dali.FileReader in its place, or the native mode, which keeps DALI's own "
    "checkpoints: they are restored only while a pipeline is built, so NativeDALILoader(make) "
    "takes a function make(checkpoint) that builds the iterator"
)


def require_no_size(iterator: Any) -> None:
    """Refuse an iterator that ends its epochs by its own count."""
    if iterator.size > 0:
        raise NotResumableError(
            f"the DALI iterator was given size={iterator.size}, so it would stop after that many "
            "samples even when an epoch was entered in the middle. The reader knows when an epoch "
            "ends: leave size and reader_name out"
        )


def sole_source(pipeline: Any) -> IndexedSource:
    """The source of our reader in ``pipeline``, if no other operator has a place of its own."""
    ours: dict[int, IndexedSource] = {}
    others: list[Any] = []
    for operator in pipeline._ops or ():
        source = _callback(operator)
        if isinstance(source, IndexedSource):
            ours[id(source)] = source
        elif _adds_something(operator):
            others.append(operator)
    readers = [one for one in others if "reader" in _name(one)]
    if readers or not ours:
        found = f"reads with {_name(readers[0])}" if readers else "has no reader of ours"
        raise NotResumableError(
            f"the DALI pipeline {found}, so it cannot be entered in mid-epoch. {_USE_OURS}"
        )
    if len(ours) > 1:
        raise NotResumableError(
            f"the DALI pipeline has {len(ours)} FileReaders, but one position belongs to one reader"
        )
    (source,) = ours.values()
    _require_ours_alone(others, source)
    return source


def _require_ours_alone(others: list[Any], source: IndexedSource) -> None:
    feeding = [one for one in others if not _draws(one) and not runs_python(one)]
    if feeding:
        raise NotResumableError(
            f"the DALI pipeline is also fed by {_name(feeding[0])}, whose place is not known: use "
            "FileReader's outputs (label, id, uniforms, weight) for what else belongs to a sample"
        )
    if others and not source.spec.native_random:
        drawing = [one for one in others if _draws(one)]
        names = ", ".join(sorted({_name(one) for one in drawing or others}))
        if drawing:
            found = f"draws random numbers of its own ({names}), which would"
        else:
            found = f"runs Python code ({names}), whose random numbers, if it draws any, would"
        raise NotResumableError(
            f"the DALI pipeline {found} not be the same after a resume: use the uniforms of "
            "FileReader(num_uniforms=...) for augmentation, or give it native_random=True if an "
            "exact order with different augmentation will do"
        )


def direct_outputs(iterator: Any, pipeline: Any, source: IndexedSource) -> Mapping[str, str]:
    """The keys of a batch that hold an unchanged output of the reader, with the output's name."""
    found = {}
    for key, node in zip(iterator.output_map, pipeline._graph_outputs, strict=True):
        if node.device == "cpu" and _callback(node.source) is source:
            found[key] = source.spec.outputs[node.source._output_index - 1]
    return found


def num_prefetched(iterator: Any, pipeline: Any) -> int:
    """Number of batches that the pipeline was fed and the iterator has not handed out yet."""
    waiting: int = pipeline._batches_to_consume
    return waiting + (iterator._first_batch is not None)


def _callback(operator: Any) -> Any:
    group = getattr(operator, "_group", None)
    return None if group is None else group.callback


def _adds_something(operator: Any) -> bool:
    """Whether the operator's output may depend on more than its inputs."""
    stateful: bool = schema(operator).IsStateful()
    return stateful or _draws(operator) or runs_python(operator)


def _draws(operator: Any) -> bool:
    draws: bool = schema(operator).HasRandomSeedArg()
    return draws


def _name(operator: Any) -> str:
    """The operator as users write it, for example "fn.random.coin_flip"."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind(operator)).lower()
    name = name.replace("dltensor_python_function_impl", "python_function")
    return f"fn.{name.replace('__', '.')}"
