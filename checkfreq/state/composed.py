"""Tensors that consist of others: sparse, quantised, nested and jagged ones, wrapper subclasses.

Such a tensor is kept as its parts, plain tensors called ``<name>:<part>``, and a record of what
puts them together: `{"kind": "sparse_coo", "parts": ["indices", "values"], "shape": [2, 3]}`. Every
kind has functions here to take one apart, to check what a manifest says of it, and to build it. A
record may be forged: indices, offsets and strides are checked before a tensor has them.

A wrapper subclass (torchao's, for example) is known by the names and the context of its
``__tensor_flatten__``. Its class is never looked up by name: a live tensor of the class is filled,
or the class is one in ``_REBUILT`` and loaded already.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkfreq.errors import StateError
from checkfreq.state.codec import decode_tree, encode_tree
from checkfreq.state.dtensors import is_dtensor
from checkfreq.state.saved_tensor import copy_bits
from checkfreq.state.tensors import (
    DTYPE_NAMES,
    DTYPES,
    LAZY,
    are_strides,
    decode_torch,
    encode_torch,
    sizes_of,
)
from checkfreq.types import Json

Record: TypeAlias = dict[str, Json]
Parts: TypeAlias = dict[str, Tensor]
#: Of each part, what the files say: dtype and shape; None for a part that is composed itself.
Outlines: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]] | None]

SUBCLASS = "subclass"
#: A plain tensor that shares its memory with others of the same object.
VIEW = "view"
_JAGGED = "jagged"
_NESTED = "nested"
_QUANTIZED = "quantized"
_COO = "sparse_coo"

#: Layout -> kind, and the names of the two lists of indices.
_COMPRESSED: dict[torch.layout, tuple[str, str, str]] = {
    torch.sparse_csr: ("sparse_csr", "crow_indices", "col_indices"),
    torch.sparse_csc: ("sparse_csc", "ccol_indices", "row_indices"),
    torch.sparse_bsr: ("sparse_bsr", "crow_indices", "col_indices"),
    torch.sparse_bsc: ("sparse_bsc", "ccol_indices", "row_indices"),
}
_LAYOUTS = {kind: (layout, one, other) for layout, (kind, one, other) in _COMPRESSED.items()}

#: Quantised dtypes whose elements are whole bytes, and the dtypes of those.
_STORED_AS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_QUANTIZED_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED_AS}
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)

#: Wrapper subclasses that are built anew where no live tensor is there yet, as in an optimizer that
#: makes its state at the first step. Their contexts are plain values.
_REBUILT = {
    ("torchao.optim.subclass_8bit", "OptimState8bit"),
    ("torchao.optim.subclass_4bit", "OptimState4bit"),
    ("torchao.optim.subclass_fp8", "OptimStateFp8"),
}


def part_name(name: str, part: str) -> str:
    """The key of a part in the file."""
    return f"{name}:{part}"


def is_composed(tensor: Tensor) -> bool:
    """Whether a tensor consists of others, instead of its bytes, dtype and shape."""
    if isinstance(tensor, LAZY) or is_dtensor(tensor):
        return False
    return (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or is_traceable_wrapper_subclass(tensor)
    )


def take_apart(tensor: Tensor, path: str) -> tuple[Record, Parts]:
    """The record of a composed tensor, and its parts: live, without their autograd graph.

    A part may be composed itself. Raises StateError, with ``path``, for what cannot be kept.
    """
    kind = _kind_of(tensor, path)
    own, parts = _KINDS[kind].take(tensor, path)
    record: Record = {"kind": kind, "parts": list(parts), "shape": _shape(tensor), **own}
    return record, parts


def _kind_of(tensor: Tensor, path: str) -> str:
    if tensor.is_meta:
        raise StateError(
            f"{path}: a tensor on the meta device has no data; materialise it (to_empty) first"
        )
    if tensor.is_quantized:
        return _QUANTIZED
    if tensor.is_nested:
        return _JAGGED if tensor.layout is torch.jagged else _NESTED
    if tensor.layout is torch.sparse_coo:
        return _COO
    if tensor.layout in _COMPRESSED:
        return _COMPRESSED[tensor.layout][0]
    if tensor.layout is not torch.strided:
        raise StateError(
            f"{path}: a tensor of layout {tensor.layout} cannot be kept, since its bytes are in an "
            "order of its library's own; keep to_dense() of it"
        )
    return SUBCLASS


def _shape(tensor: Tensor) -> list[int]:
    """The shape as it can be written: sizes that differ from row to row are left out."""
    return [] if tensor.is_nested else list(tensor.shape)


def misfit(record: Record, outlines: Outlines, live: Tensor) -> str:
    """Why a live tensor cannot become the saved one in place; "" if it can."""
    if record["kind"] == VIEW:
        return _misfit_of_view(record, live)
    if not is_composed(live):
        return f"checkpoint has {described(record)}, live is {_dtype_of(live)}{list(live.shape)}"
    try:
        mine, parts = take_apart(live, "live")
    except StateError as error:
        return f"checkpoint has {described(record)}; {error}"
    same = record["kind"] == mine["kind"] and record["shape"] == mine["shape"]
    if not same or record.get("class") != mine.get("class"):
        return f"checkpoint has {described(record)}, live is {described(mine)}"
    if record.get("context") != mine.get("context"):
        return (
            f"checkpoint has a {record['class']} made with {_short(record['context'])}, live was "
            f"made with {_short(mine['context'])}"
        )
    if record["kind"] == _NESTED and (live.requires_grad or weakref.getweakrefs(live)):
        return "live is a nested tensor that is a parameter or has weak references"
    for name in {*record["parts"]} | {*parts}:
        there, here = outlines.get(name), parts.get(name)
        if here is None or name not in outlines:
            return f"only one of checkpoint and live has a part {name!r}"
        if there is None or is_composed(here):
            continue
        fixed = record["kind"] in (SUBCLASS, _JAGGED)
        if there[0] != here.dtype or (fixed and there[1] != tuple(here.shape)):
            return (
                f"part {name!r}: checkpoint has {DTYPE_NAMES[there[0]]}{list(there[1])}, live is "
                f"{_dtype_of(here)}{list(here.shape)}"
            )
    return ""


def described(record: Record) -> str:
    """A saved tensor in a few words."""
    what = record.get("class") or record["kind"]
    return f"a {what} tensor{'' if not record['shape'] else ' ' + str(list(record['shape']))}"


def _dtype_of(tensor: Tensor) -> str:
    return DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _short(context: Json) -> str:
    return f"{context!r:.120}"


def check(
    record: Json, outlines: Callable[[str], tuple[torch.dtype, tuple[int, ...]] | None]
) -> None:
    """Raise ValueError unless a record makes sense, as far as can be known without the bytes.

    ``outlines`` returns what the files say of a part, None if that is composed itself, and raises
    for a part that is not there.
    """
    _require(isinstance(record, dict) and record.get("kind") in _KINDS, "kind of tensor", record)
    names = record["parts"]
    _require(isinstance(names, list) and all(isinstance(n, str) for n in names), "parts", names)
    _require(len({*names}) == len(names), "parts", names)
    sizes_of(record["shape"])
    known = {name: outlines(name) for name in names}
    kind = _KINDS[record["kind"]]
    if kind.parts is not None:
        missing = kind.parts - known.keys()
        there = not missing and None not in known.values()
        _require(there and known.keys() <= kind.parts | kind.optional, "parts", names)
    kind.check(record, known)


def can_build(record: Record) -> bool:
    """Whether the tensor can be made without a live one to fill."""
    return record["kind"] != SUBCLASS or _loaded_class(record["class"]) is not None


def build(record: Record, parts: Parts, *, live: Tensor | None = None) -> Tensor:
    """The tensor, on the memory of its parts.

    Of a subclass that cannot be built by itself, ``live`` has the class and the context; ``misfit``
    has compared them. Raises ValueError for parts that make no tensor.
    """
    try:
        return _KINDS[record["kind"]].build(record, parts, live)
    except (RuntimeError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"parts of {described(record)}: {str(error)[:200]}") from None


def put(live: Tensor, new: Tensor) -> None:
    """Give a live tensor what ``new`` has, which was built from the saved parts and fits it.

    The live tensor stays the same object; its memory stays where the parts have the same shapes.
    """
    with torch.no_grad():
        if not is_composed(live):  # it is a view
            copy_bits(live, new)
            return
        _, old = take_apart(live, "live")
        _, fresh = take_apart(new, "saved")
        if live.is_quantized:
            _put_quantized(live, new)
        elif live.is_nested and live.layout is torch.strided:
            swap: Any = torch.utils.swap_tensors
            swap(live, new)  # what it remembers of its sizes too
        elif all(old[name].shape == part.shape for name, part in fresh.items()):
            for name, part in fresh.items():
                copy_bits(old[name], part)
            if live.layout is torch.sparse_coo:
                live._coalesced_(new.is_coalesced())
            elif live.layout is torch.jagged:
                _sequence_lengths(live).clear()
                _sequence_lengths(live).update(_sequence_lengths(new))
        elif live.layout is torch.sparse_coo:
            live.data = new
        else:
            live.detach().resize_as_sparse_(new).copy_(new)


# ---- sparse


def _take_coo(tensor: Tensor, path: str) -> tuple[Record, Parts]:
    live = tensor.detach()
    own = {"coalesced": tensor.is_coalesced()}
    return own, {"indices": live._indices(), "values": live._values()}


def _check_coo(record: Record, outlines: Outlines) -> None:
    indices, values = _outline(outlines, "indices"), _outline(outlines, "values")
    _require(type(record["coalesced"]) is bool, "coalesced", record["coalesced"])
    _require(indices[0] is torch.int64 and len(indices[1]) == 2, "indices", indices)
    sparse_dim, num_values = indices[1]
    good = sparse_dim <= len(record["shape"]) and len(values[1]) >= 1
    _require(good and values[1] == (num_values, *record["shape"][sparse_dim:]), "values", values)


def _build_coo(record: Record, parts: Parts, live: Tensor | None) -> Tensor:
    return torch.sparse_coo_tensor(
        parts["indices"],
        parts["values"],
        record["shape"],
        device=parts["values"].device,
        is_coalesced=record["coalesced"],
        check_invariants=True,
    )


def _take_compressed(tensor: Tensor, path: str) -> tuple[Record, Parts]:
    live = tensor.detach()
    _, compressed, plain = _COMPRESSED[tensor.layout]
    parts = {compressed: getattr(live, compressed)(), plain: getattr(live, plain)()}
    return {}, {**parts, "values": live.values()}


def _check_compressed(record: Record, outlines: Outlines) -> None:
    _, compressed, plain = _LAYOUTS[record["kind"]]
    pair = _outline(outlines, compressed), _outline(outlines, plain)
    good = pair[0][0] == pair[1][0] and pair[0][0] in (torch.int32, torch.int64)
    _require(good, "dtypes of indices", pair)
    _require(len(record["shape"]) >= 2, "shape", record["shape"])


def _build_compressed(record: Record, parts: Parts, live: Tensor | None) -> Tensor:
    layout, compressed, plain = _LAYOUTS[record["kind"]]
    return torch.sparse_compressed_tensor(
        parts[compressed],
        parts[plain],
        parts["values"],
        record["shape"],
        layout=layout,
        device=parts["values"].device,
        check_invariants=True,
    )


# ---- quantised


def _take_quantized(tensor: Tensor, path: str) -> tuple[Record, Parts]:
    live, name = tensor.detach(), str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in _STORED_AS:
        raise StateError(
            f"{path}: a quantised tensor of {tensor.dtype} cannot be kept, since several of its "
            f"elements share a byte; expected one of {', '.join(_QUANTIZED_NAMES)}. Keep its "
            "int_repr() and its scale"
        )
    own: Record = {"dtype": name, "scheme": str(tensor.qscheme()).removeprefix("torch.")}
    parts = {"values": _stored(live)}
    if tensor.qscheme() in _PER_CHANNEL:
        own["axis"] = tensor.q_per_channel_axis()
        parts["scales"] = live.q_per_channel_scales()
        parts["zero_points"] = live.q_per_channel_zero_points()
    else:
        own["scale"] = encode_tree(tensor.q_scale(), path)
        own["zero_point"] = tensor.q_zero_point()
    return own, parts


def _stored(live: Tensor) -> Tensor:
    """The integers of a quantised tensor, on its memory; ``int_repr()`` is a copy."""
    bare = torch.empty(0, dtype=_STORED_AS[live.dtype], device=live.device)
    offset, sizes, strides = live.storage_offset(), live.size(), live.stride()
    return bare.set_(live.untyped_storage(), offset, sizes, strides)


def _check_quantized(record: Record, outlines: Outlines) -> None:
    dtype = _QUANTIZED_NAMES.get(record["dtype"])
    _require(dtype is not None, "quantised dtype", record["dtype"])
    assert dtype is not None
    values, shape = _outline(outlines, "values"), tuple(record["shape"])
    _require(values == (_STORED_AS[dtype], shape), "values", values)
    schemes = {str(scheme).removeprefix("torch.") for scheme in _PER_CHANNEL}
    if record["scheme"] not in schemes:
        _require(record["scheme"] == "per_tensor_affine", "scheme", record["scheme"])
        good = type(decode_tree(record["scale"])) is float and type(record["zero_point"]) is int
        _require(good and abs(record["zero_point"]) < 2**31, "scale", record["scale"])
        return
    axis = record["axis"]
    _require(type(axis) is int and 0 <= axis < len(shape), "axis", axis)
    for name in ("scales", "zero_points"):
        _require(_outline(outlines, name)[1] == (shape[axis],), name, outlines.get(name))


def _build_quantized(record: Record, parts: Parts, live: Tensor | None) -> Tensor:
    dtype, values = _QUANTIZED_NAMES[record["dtype"]], parts["values"]
    if "scales" in parts:
        new = torch._empty_per_channel_affine_quantized(
            record["shape"],
            scales=parts["scales"],
            zero_points=parts["zero_points"],
            axis=record["axis"],
            dtype=dtype,
            device=values.device,
        )
    else:
        new = torch._empty_affine_quantized(
            record["shape"],
            scale=decode_tree(record["scale"]),
            zero_point=record["zero_point"],
            dtype=dtype,
            device=values.device,
        )
    _stored(new).copy_(values)
    return new


def _put_quantized(live: Tensor, new: Tensor) -> None:
    if live.qscheme() == new.qscheme() and live.dtype == new.dtype:
        live.copy_(new)  # the scales too
    else:
        live.data = new


# ---- nested


def _take_nested(tensor: Tensor, path: str) -> tuple[Record, Parts]:
    live = tensor.detach()
    bare = torch.empty(0, dtype=live.dtype, device=live.device)
    storage = live.untyped_storage()
    parts = {
        "values": bare.set_(storage, 0, (storage.nbytes() // live.element_size(),), (1,)),
        "sizes": live._nested_tensor_size(),
        "strides": live._nested_tensor_strides(),
        "offsets": live._nested_tensor_storage_offsets(),
    }
    return {}, parts


def _check_nested(record: Record, outlines: Outlines) -> None:
    values, sizes = _outline(outlines, "values"), _outline(outlines, "sizes")
    strides, offsets = _outline(outlines, "strides"), _outline(outlines, "offsets")
    _require(len(values[1]) == 1, "values", values)
    _require(strides == sizes and sizes[0] is torch.int64, "sizes", sizes)
    _require(offsets == (torch.int64, sizes[1][:1]), "offsets", offsets)


def _build_nested(record: Record, parts: Parts, live: Tensor | None) -> Tensor:
    values, sizes = parts["values"], parts["sizes"].cpu()
    strides, offsets = parts["strides"].cpu(), parts["offsets"].cpu()
    room = values.numel()
    for offset, size, stride in zip(
        offsets.tolist(),
        *(t.reshape(len(offsets), -1).tolist() for t in (sizes, strides)),
        strict=True,
    ):
        good = all(0 <= n <= room for n in (offset, *size, *stride))
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        _require(good and (0 in size or last < room), "an element of a nested tensor", last)
    return torch._nested_view_from_buffer(values, sizes, strides, offsets)


def _take_jagged(tensor: Any, path: str) -> tuple[Record, Parts]:
    live = tensor.detach()
    parts = {"values": live.values(), "offsets": live.offsets()}
    if live.lengths() is not None:
        parts["lengths"] = live.lengths()
    own = {
        "ragged_dim": tensor._ragged_idx,
        "sequence_lengths": [tensor._maybe_min_seqlen, tensor._maybe_max_seqlen],
    }
    return own, {name: part.detach() for name, part in parts.items()}


def _sequence_lengths(jagged: Any) -> dict[str, Tensor]:
    """What a jagged tensor remembers of its shortest and longest row."""
    known: dict[str, Tensor] = jagged._metadata_cache
    return known


def _check_jagged(record: Record, outlines: Outlines) -> None:
    values, offsets = _outline(outlines, "values"), _outline(outlines, "offsets")
    integers = (torch.int32, torch.int64)
    _require(
        offsets[0] in integers and len(offsets[1]) == 1 and offsets[1][0] > 0, "offsets", offsets
    )
    if "lengths" in outlines:
        lengths = _outline(outlines, "lengths")
        good = lengths[0] in integers and lengths[1] == (offsets[1][0] - 1,)
        _require(good, "lengths", lengths)
    dim = record["ragged_dim"]
    _require(type(dim) is int and 1 <= dim <= len(values[1]), "ragged_dim", dim)
    known = record["sequence_lengths"]
    good = isinstance(known, list) and len(known) == 2
    _require(good and all(n is None or type(n) is int for n in known), "sequence_lengths", known)


def _build_jagged(record: Record, parts: Parts, live: Tensor | None) -> Tensor:
    values, offsets, lengths = parts["values"], parts["offsets"], parts.get("lengths")
    begins = offsets.tolist()
    ends = begins[1:]
    if lengths is not None:
        ends = [begin + length for begin, length in zip(begins, lengths.tolist(), strict=False)]
    rows = zip(begins, ends, strict=False)
    last = values.shape[record["ragged_dim"] - 1]
    good = begins[0] >= 0 and all(begin <= end <= last for begin, end in rows)
    _require(good and begins[-1] <= last, "offsets of a jagged tensor", begins)
    shortest, longest = record["sequence_lengths"]
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths, record["ragged_dim"], shortest, longest
    )


# ---- wrapper subclasses


def _take_subclass(tensor: Any, path: str) -> tuple[Record, Parts]:
    names, context = tensor.__tensor_flatten__()
    kind = type(tensor)
    own: Record = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "dtype": _dtype_of(tensor),
        "strides": list(tensor.stride()),
        "context": _context(context, f"{path}: what a {kind.__qualname__} was made with"),
    }
    return own, {name: getattr(tensor, name).detach() for name in names}


def _context(value: Any, path: str) -> Json:
    """The context as JSON: of a class in ``_REBUILT`` it is decoded, of any other only compared."""

    def refuse(tensor: Tensor, where: str) -> str:
        raise StateError(f"{where}: a tensor outside of its parts cannot be kept")

    def leaf(inner: Any, where: str) -> dict[str, Json] | None:
        kind = type(inner)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(inner, enum.Enum):
            return {"$enum": f"{name}.{inner.name}"}
        if dataclasses.is_dataclass(inner):
            fields = {f.name: getattr(inner, f.name) for f in dataclasses.fields(inner)}
            return {"$fields": name, "values": encode_tree(fields, where, leaf=leaf)}
        if isinstance(inner, tuple) and hasattr(inner, "_asdict"):
            return {"$fields": name, "values": encode_tree(inner._asdict(), where, leaf=leaf)}
        if kind is type or (callable(inner) and hasattr(inner, "__qualname__")):
            return {"$name": f"{inner.__module__}.{inner.__qualname__}"}
        return encode_torch(inner, where, refuse)

    return encode_tree(value, path, leaf=leaf)


def _check_subclass(record: Record, outlines: Outlines) -> None:
    _require(isinstance(record["class"], str), "class", record["class"])
    _require(record["dtype"] in DTYPES, "dtype", record["dtype"])
    _require(len(sizes_of(record["strides"])) == len(record["shape"]), "strides", record["strides"])
    _require("context" in record, "context", None)


def _loaded_class(name: str) -> Any:
    module, _, qualified = name.rpartition(".")
    found = (module, qualified) in _REBUILT and sys.modules.get(module)
    return getattr(found, qualified, None) if found else None


def _build_subclass(record: Record, parts: Parts, live: Any) -> Tensor:
    kind, context = (type(live), live.__tensor_flatten__()[1]) if live is not None else (None, None)
    if kind is None:
        kind = _loaded_class(record["class"])
        assert kind is not None, "can_build is asked first"
        context = decode_tree(
            record["context"], leaf=lambda tag, node: decode_torch(tag, node, _no_tensor)
        )
    new: Tensor = kind.__tensor_unflatten__(parts, context, torch.Size(record["shape"]), None)
    good = tuple(new.shape) == tuple(record["shape"]) and _dtype_of(new) == record["dtype"]
    _require(good, "a tensor of these parts", f"{_dtype_of(new)}{list(new.shape)}")
    return new


def _no_tensor(key: str, device: str) -> Tensor:
    raise ValueError("a tensor outside of its parts")


# ---- views


def view_of(memory: Tensor, tensor: Tensor) -> Record:
    """The record of a plain tensor that lies in ``memory``, a flat tensor of bytes."""
    offset = tensor.data_ptr() - memory.data_ptr()
    return {
        "kind": VIEW,
        "parts": ["memory"],
        "shape": list(tensor.shape),
        "dtype": DTYPE_NAMES[tensor.dtype],
        "strides": list(tensor.stride()),
        "offset": offset // tensor.element_size(),
        "conj": tensor.is_conj(),
    }


def _misfit_of_view(record: Record, live: Tensor) -> str:
    fits = (
        not is_composed(live)
        and not is_dtensor(live)
        and (list(live.shape), [*live.stride()]) == (record["shape"], record["strides"])
        and live.dtype == DTYPES[record["dtype"]]
        and live.is_conj() == record["conj"]
        and not live.is_neg()
        and are_strides(record["strides"], tuple(live.shape))
    )
    return "" if fits else f"checkpoint has {described(record)}, live is different"


def _take_view(tensor: Tensor, path: str) -> tuple[Record, Parts]:
    raise AssertionError("only the collector knows the others that share its memory")


def _check_view(record: Record, outlines: Outlines) -> None:
    memory, dtype = _outline(outlines, "memory"), DTYPES.get(record["dtype"])
    _require(memory[0] is torch.uint8 and len(memory[1]) == 1, "memory", memory)
    _require(dtype is not None, "dtype", record["dtype"])
    assert dtype is not None
    shape, (*strides, offset) = record["shape"], sizes_of([*record["strides"], record["offset"]])
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    good = 0 not in shape and (last + 1) * dtype.itemsize <= memory[1][0]
    _require(good, "place of a view", record["offset"])
    _require(type(record["conj"]) is bool, "conj", record["conj"])


def _build_view(record: Record, parts: Parts, live: Tensor | None) -> Tensor:
    bare = torch.empty(0, dtype=DTYPES[record["dtype"]], device=parts["memory"].device)
    storage = parts["memory"].untyped_storage()
    view = bare.set_(storage, record["offset"], record["shape"], record["strides"])
    return view.conj() if record["conj"] else view


# ---- all of them


class _Kind(NamedTuple):
    """The functions of a kind, and the names of its parts: None if they are the tensor's own."""

    take: Callable[[Any, str], tuple[Record, Parts]]
    check: Callable[[Record, Outlines], None]
    build: Callable[[Record, Parts, Tensor | None], Tensor]
    parts: frozenset[str] | None
    optional: frozenset[str] = frozenset()


def _compressed_kind(compressed: str, plain: str) -> _Kind:
    names = frozenset((compressed, plain, "values"))
    return _Kind(_take_compressed, _check_compressed, _build_compressed, names)


_KINDS: dict[str, _Kind] = {
    _COO: _Kind(_take_coo, _check_coo, _build_coo, frozenset(("indices", "values"))),
    **{kind: _compressed_kind(one, other) for kind, one, other in _COMPRESSED.values()},
    _QUANTIZED: _Kind(
        _take_quantized,
        _check_quantized,
        _build_quantized,
        frozenset(("values",)),
        frozenset(("scales", "zero_points")),
    ),
    _NESTED: _Kind(
        _take_nested,
        _check_nested,
        _build_nested,
        frozenset(("values", "sizes", "strides", "offsets")),
    ),
    _JAGGED: _Kind(
        _take_jagged,
        _check_jagged,
        _build_jagged,
        frozenset(("values", "offsets")),
        frozenset(("lengths",)),
    ),
    VIEW: _Kind(_take_view, _check_view, _build_view, frozenset(("memory",))),
    SUBCLASS: _Kind(_take_subclass, _check_subclass, _build_subclass, None),
}


def _outline(outlines: Outlines, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    found = outlines.get(name)
    if found is None:
        raise ValueError(f"expected a part {name!r}")
    return found


def _require(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{what}: got {got!r:.80}")
