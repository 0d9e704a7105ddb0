"""What ``DALILoader`` reads off a built DALI iterator and its pipeline, and what it refuses.

Behind DALI's public interface, as ``operators`` is (attributes as of DALI 2.4): which operators
a pipeline has, which of its outputs come straight from our reader, and how many of the batches
it prefetched were not handed out yet.
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
    """Refuse an iterator that stops by its own count."""
    if iterator.size > 0:
        raise NotResumableError(
            f"the DALI iterator was given size={iterator.size}, so it would stop by its own count "
            "wherever it began; the reader says when an epoch ends: leave size and reader_name out"
        )


def sole_source(pipeline: Any) -> IndexedSource:
    """Our reader's source in ``pipeline``, if nothing else there has a place of its own."""
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
            f"the DALI pipeline {found}, which cannot be entered at a place. {_USE_OURS}"
        )
    if len(ours) > 1:
        raise NotResumableError(
            f"the DALI pipeline has {len(ours)} FileReaders: one position needs one of them"
        )
    (source,) = ours.values()
    _require_ours_alone(others, source)
    return source


def _require_ours_alone(others: list[Any], source: IndexedSource) -> None:
    feeding = [one for one in others if not _draws(one) and not runs_python(one)]
    if feeding:
        raise NotResumableError(
            f"the DALI pipeline is also fed by {_name(feeding[0])}, whose place is not known: let "
            "FileReader's outputs (label, id, uniforms, weight) say what else belongs to a sample"
        )
    if others and not source.spec.native_random:
        drawing = [one for one in others if _draws(one)]
        names = ", ".join(sorted({_name(one) for one in drawing or others}))
        if drawing:
            found = f"draws random numbers of its own ({names}), which would"
        else:
            found = f"runs Python code ({names}), whose random numbers, if it draws any, would"
        raise NotResumableError(
            f"the DALI pipeline {found} not be the same after a resume: make the augmentation of "
            "FileReader(num_uniforms=...), or give it native_random=True if exact order with "
            "other augmentation will do"
        )


def direct_outputs(iterator: Any, pipeline: Any, source: IndexedSource) -> Mapping[str, str]:
    """Which keys of a batch hold an output of the reader as it is: key to name of the output."""
    found = {}
    for key, node in zip(iterator.output_map, pipeline._graph_outputs, strict=True):
        if node.device == "cpu" and _callback(node.source) is source:
            found[key] = source.spec.outputs[node.source._output_index - 1]
    return found


def num_prefetched(iterator: Any, pipeline: Any) -> int:
    """Batches that were fed to the pipeline and that the iterator did not hand out yet."""
    waiting: int = pipeline._batches_to_consume
    return waiting + (iterator._first_batch is not None)


def _callback(operator: Any) -> Any:
    group = getattr(operator, "_group", None)
    return None if group is None else group.callback


def _adds_something(operator: Any) -> bool:
    """Whether what comes out may depend on more than what goes in."""
    stateful: bool = schema(operator).IsStateful()
    return stateful or _draws(operator) or runs_python(operator)


def _draws(operator: Any) -> bool:
    draws: bool = schema(operator).HasRandomSeedArg()
    return draws


def _name(operator: Any) -> str:
    """As users write it: "fn.random.coin_flip"."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind(operator)).lower()
    name = name.replace("dltensor_python_function_impl", "python_function")
    return f"fn.{name.replace('__', '.')}"
