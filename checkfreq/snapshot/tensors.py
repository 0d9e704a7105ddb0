"""What a tensor must be to be kept, and how tensors appear inside JSON trees.

``{"$tensor": key}`` stands for the tensor ``key`` of the object's file. A NumPy array that
torch can represent is kept as a tensor too, tagged ``$ndarray``, so that arrays never swell
the manifest.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.types import Json

_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)

#: dtype -> torch's name without "torch.", for every dtype whose bytes can be kept.
DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in _DTYPE_NAMES if hasattr(torch, name)
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMPY_DTYPES = {
    *("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8"),
    *("<f2", "<f4", "<f8", "<c8", "<c16"),
}


#: Parameters and buffers that have no shape before the first forward pass.
LAZY: tuple[type, ...] = (
    torch.nn.parameter.UninitializedParameter,
    torch.nn.parameter.UninitializedBuffer,
)


def is_ordinary(tensor: Tensor) -> bool:
    """True if a tensor can be kept as it is; the fast half of :func:`detached`."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in DTYPE_NAMES
        and tensor.layout is torch.strided
        and not tensor.is_meta
    )


def detached(tensor: Tensor, path: str) -> Tensor:
    """``tensor`` without its graph, on the same storage.

    Raises StateError, naming ``path``, for a tensor whose bytes alone do not say what it is.
    """
    if is_ordinary(tensor):
        return tensor.detach()
    problem = _problem(tensor)
    if problem is not None:
        raise StateError(f"{path}: {problem}")
    return tensor.detach().as_subclass(Tensor)


def require_memory(path: str, live: Tensor) -> None:
    """Raise StateError, naming ``path``, for a live tensor that nothing can be loaded into."""
    if live.is_meta:
        raise StateError(
            f"{path}: a tensor on the meta device has no memory to restore into; call to_empty() "
            "before restore()"
        )


def _problem(tensor: Tensor) -> str | None:
    if isinstance(tensor, LAZY):
        return "a lazy parameter without a shape yet; run one forward pass before checkpointing"
    if tensor.is_meta:
        return "a tensor on the meta device has no data; materialise it (to_empty) first"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}) cannot be kept; keep int_repr() and its scale"
    if tensor.is_nested:
        return "a nested tensor cannot be kept; keep its values and offsets"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be kept; keep its indices and values"
    if tensor.dtype not in DTYPE_NAMES:
        return f"a tensor of dtype {tensor.dtype} cannot be kept; expected one of {_DTYPE_NAMES}"
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__qualname__} wraps other tensors; keep those instead"
    return None


def encode_torch(
    value: Any, path: str, add: Callable[[Tensor, str], str]
) -> dict[str, Json] | None:
    """Tagged object of a torch value or NumPy array; ``add`` keeps a tensor and returns its key."""
    if isinstance(value, Tensor):
        node: dict[str, Json] = {"$tensor": add(value, path)}
        if not value.is_cpu:
            node["device"] = str(value.device)
        return node
    if isinstance(value, torch.Size):
        return {"$torch.Size": list(value)}
    kind = type(value)
    if kind in (torch.dtype, torch.memory_format, torch.layout):
        return {f"$torch.{kind.__name__}": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$torch.device": str(value)}
    return _encode_array(value, path, add)


def _encode_array(
    value: Any, path: str, add: Callable[[Tensor, str], str]
) -> dict[str, Json] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.dtype.str not in _NUMPY_DTYPES:
        return None
    node: dict[str, Json] = {"$ndarray": add(_array_as_tensor(value), path)}
    if value.flags.f_contiguous and not value.flags.c_contiguous:
        node["order"] = "F"
    return node


def _array_as_tensor(array: Any) -> Tensor:
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    with warnings.catch_warnings():  # the tensor is only read: a read-only array is as good
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def decode_torch(tag: str, node: dict[str, Json], tensor: Callable[[str, str], Tensor]) -> Any:
    """Value of a tag of :func:`encode_torch`; ``tensor(key, device)`` gives an owned tensor."""
    if tag == "$tensor":
        return tensor(node["$tensor"], node.get("device", "cpu"))
    if tag == "$ndarray":
        array = tensor(node["$ndarray"], "cpu").numpy()
        return array.copy(order="F") if node.get("order") == "F" else array
    if tag == "$torch.Size":
        return torch.Size(node[tag])
    if tag == "$torch.device":
        return torch.device(node[tag])
    if tag in ("$torch.dtype", "$torch.memory_format", "$torch.layout"):
        return getattr(torch, node[tag])
    raise ValueError(f"unknown tag {tag!r}: written by a newer checkfreq?")


def copy_bits(target: Tensor, source: Tensor) -> None:
    """Copy values into ``target`` in place, also where ``target`` is expanded (stride 0)."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def usable_device(name: str) -> torch.device:
    """The recorded device if this process has it, the current one of its type, or the CPU."""
    device = torch.device(name)
    if device.type == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return torch.device("cpu")
    if device.index is not None and device.index < torch.accelerator.device_count():
        return device
    return torch.device(device.type)
