"""A cheap, deterministic fingerprint of a dataset, so that a restore with other data is refused.

It consists of the class name and the length. For folder datasets (with ``samples`` or ``imgs``,
pairs of path and label) it includes a digest of the paths below ``root`` and of the labels: a moved
root is the same data, a renamed, added or relabelled file is not (0.5 s for a million paths).
Subsets and concatenations are followed, and so is an order that a dataset holds in ``_indices``
(those of ``datasets`` and of torch_geometric, shuffled or split). Other datasets of the same class
and length cannot be told apart, unless the dataset has a method ``data_fingerprint()`` or the user
gives ``fingerprint=``; see ``contents.py`` for what is noticed beyond.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Sized
from hashlib import blake2b
from typing import Any

import numpy as np

_BLOCK = 4096


def dataset_fingerprint(dataset: object, given: str | None = None) -> str:
    """The fingerprint of ``dataset``: equal for equal data, in any process, on any machine.

    ``given`` is the user's own, which takes precedence.
    """
    if given is not None:
        return given
    own = attribute(dataset, "data_fingerprint")
    if callable(own):
        return str(own())
    name = f"{type(dataset).__qualname__}:{length_or_none(dataset) or 0}"
    parts = [one for one in (_followed(dataset), _ordered(dataset), _listed(dataset)) if one]
    return ":".join([name, *parts])


def attribute(data: object, name: str) -> Any:
    """The attribute; None if there is none, or code of the data's own fails to get it."""
    try:
        return getattr(data, name, None)
    except Exception:  # a property of what is not loaded yet
        return None


def length_or_none(data: object) -> int | None:
    """``len(data)``; None if it has none, or says so only when asked (torch's DataLoader)."""
    if not isinstance(data, Sized):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def sample_name(dataset: object, index: int) -> str:
    """The result of the dataset's ``sample_name``, else the path below its root, else a number."""
    own = getattr(dataset, "sample_name", None)
    if callable(own):
        return str(own(index))
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and indices is not None:
        return sample_name(inner, int(indices[index]))
    entries = _entries(dataset)
    if entries is None:
        return f"sample {index}"
    entry = entries[index]
    path: str = os.fspath(entry if _is_path(entry) else entry[0])
    return path.removeprefix(_prefix(dataset))


def listing_digest(entries: Iterable[Any], prefix: str = "") -> str:
    """Digest a list of paths (relative to ``prefix``), or of tuples (path, labels), in order."""
    return _digest(_encoded(entries, prefix))


def _followed(dataset: object) -> str:
    """The fingerprints of the datasets inside a subset or a concatenation."""
    inner, indices = attribute(dataset, "dataset"), attribute(dataset, "indices")
    if inner is not None and indices is not None:
        chosen = np.asarray(list(indices), dtype=np.int64)
        return f"{_digest([chosen.astype('<i8').tobytes()])}({dataset_fingerprint(inner)})"
    several = attribute(dataset, "datasets")
    if isinstance(several, (list, tuple)):
        return f"({'+'.join(dataset_fingerprint(one) for one in several)})"
    return ""


def _ordered(dataset: object) -> str:
    """A digest of the dataset's own ``_indices``: numbers of its samples, or a table of them."""
    found = attribute(dataset, "_indices")
    if callable(getattr(found, "column", None)):
        found = found.column(0).to_numpy()
    if length_or_none(found) is None or length_or_none(found) != length_or_none(dataset):
        return ""
    try:
        order = np.asarray(found)
    except (TypeError, ValueError):
        return ""
    is_order = order.ndim == 1 and order.dtype.kind in "iu"
    return f"ordered({_digest([order.astype('<i8').tobytes()])})" if is_order else ""


def _listed(dataset: object) -> str:
    """A digest of the file list of a folder dataset, relative to its root."""
    entries = _entries(dataset)
    return "" if entries is None else listing_digest(entries, _prefix(dataset))


def _entries(dataset: object) -> Sequence[Any] | None:
    """The file list of a folder dataset."""
    for name in ("samples", "imgs"):
        entries = attribute(dataset, name)
        if isinstance(entries, (list, tuple)) and entries and _is_entry(entries[0]):
            return entries
    return None


def _prefix(dataset: object) -> str:
    root = attribute(dataset, "root")
    return os.path.join(os.fspath(root), "") if _is_path(root) and root else ""


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


def _is_entry(value: Any) -> bool:
    return _is_path(value) or (
        isinstance(value, (list, tuple)) and bool(value) and _is_path(value[0])
    )


def _encoded(entries: Iterable[Any], prefix: str) -> Iterable[bytes]:
    block: list[str] = []
    for entry in entries:
        path, label = (entry, "") if _is_path(entry) else (entry[0], repr(entry[1:]))
        block.append(f"{os.fspath(path).removeprefix(prefix)}\0{label}\n")
        if len(block) == _BLOCK:
            yield "".join(block).encode(errors="surrogateescape")
            block.clear()
    yield "".join(block).encode(errors="surrogateescape")


def _digest(blocks: Iterable[bytes]) -> str:
    digest = blake2b(digest_size=8)
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
