"""Which tensors can be kept, and how tensors appear inside JSON trees.

``{"$tensor": key}`` stands for the tensor ``key`` of the object's file. A NumPy array that torch
can represent is kept as a tensor too, tagged ``$ndarray``, so that it does not bloat the manifest.
"""

from __future__ import annotations

import functools
import re
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
    "float4_e2m1fn_x2",
)

#: dtype -> torch's name without "torch.", for every dtype whose bytes can be kept.
DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in _DTYPE_NAMES if hasattr(torch, name)
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def _named(kind: type) -> dict[str, Any]:
    """Constants of torch by the name that ``str`` gives them, without "torch."."""
    found = (value for value in vars(torch).values() if isinstance(value, kind))
    return {str(value).removeprefix("torch."): value for value in found}


#: All constants that a tag can name. Nothing in a checkpoint is looked up in a module: it may be
#: forged.
_CONSTANTS: dict[str, dict[str, Any]] = {
    "$torch.dtype": _named(torch.dtype),
    "$torch.memory_format": _named(torch.memory_format),
    "$torch.layout": _named(torch.layout),
}

_DEVICE = re.compile(r"([a-z][a-z0-9_]{0,31})(?::(0|[1-9][0-9]{0,3}))?")
#: As torch lists them; a custom backend adds its name at run time.
_DEVICE_TYPES = frozenset(
    (
        *("cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga"),
        *("maia", "xla", "lazy", "vulkan", "mps", "meta", "hpu", "mtia", "npu", "privateuseone"),
    )
)

_PLAIN = (Tensor, torch.nn.Parameter)
_NUMPY_DTYPES = {
    *("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8"),
    *("<f2", "<f4", "<f8", "<c8", "<c16"),
}


#: Recorded instead of a device: the device of the parameter that the tensor belongs to.
ON_PARAMETER = "parameter"

#: Parameters and buffers that have no shape before the first forward pass.
LAZY: tuple[type, ...] = (
    torch.nn.parameter.UninitializedParameter,
    torch.nn.parameter.UninitializedBuffer,
)


#: Types of devices whose tensors can be kept: host memory, and those of snapshot/backends.py. Of
#: each, what lists the accelerators that this process uses.
_KEPT_ON: dict[str, Callable[[], list[torch.device]]] = {"cpu": list, "cuda": list}


def keep_tensors_on(kind: str, in_use: Callable[[], list[torch.device]]) -> None:
    """Tensors on devices of type ``kind`` can be kept from now on; ``in_use`` initialises none."""
    _KEPT_ON[kind] = in_use
    is_kept_on.cache_clear()


def devices_in_use() -> list[torch.device]:
    """The accelerators that this process uses, whether or not a tracked tensor is on them."""
    return [device for in_use in _KEPT_ON.values() for device in in_use()]


@functools.cache
def is_kept_on(device: torch.device) -> bool:
    """Whether tensors on ``device`` can be kept."""
    return device.type in _KEPT_ON


def require_kept(path: str, device: torch.device) -> None:
    """Raise StateError, with ``path``, if tensors on ``device`` cannot be kept."""
    if not is_kept_on(device):
        raise StateError(
            f"{path}: a tensor on the device {device} cannot be kept; expected one on "
            f"{' or '.join(sorted(_KEPT_ON))}. Move it there, or leave it out of CFCheckpoint"
        )


def is_ordinary(tensor: Tensor) -> bool:
    """True if a tensor can be kept as it is; the fast check before :func:`detached`."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in DTYPE_NAMES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and (tensor.is_cpu or is_kept_on(tensor.device))
    )


def detached(tensor: Tensor, path: str) -> Tensor:
    """``tensor`` without its autograd graph, on the same storage.

    Raises StateError, with ``path``, for a tensor that is more than its bytes, dtype and shape.
    """
    if is_ordinary(tensor):
        return tensor.detach()
    problem = _problem(tensor)
    if problem is not None:
        raise StateError(f"{path}: {problem}")
    return tensor.detach().as_subclass(Tensor)


def require_memory(path: str, live: Tensor) -> None:
    """Raise StateError, with ``path``, for a live tensor that has no memory to load into."""
    if live.is_meta:
        raise StateError(
            f"{path}: a tensor on the meta device has no memory to restore into; call to_empty() "
            "before restore()"
        )
    require_kept(path, live.device)


def _problem(tensor: Tensor) -> str | None:
    if isinstance(tensor, LAZY):
        return "a lazy parameter without a shape yet; run one forward pass before checkpointing"
    if tensor.is_meta:
        return "a tensor on the meta device has no data; materialise it (to_empty) first"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return "a tensor that consists of others cannot be kept here; keep its parts"
    if tensor.dtype not in DTYPE_NAMES:
        return f"a tensor of dtype {tensor.dtype} cannot be kept; expected one of {_DTYPE_NAMES}"
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__qualname__} wraps other tensors; keep those instead"
    return None


def encode_torch(
    value: Any, path: str, add: Callable[[Tensor, str], str]
) -> dict[str, Json] | None:
    """The tagged object for a torch value or NumPy array; None for other values.

    ``add(tensor, path)`` keeps a tensor and returns its key.
    """
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
    return {"$ndarray": add(_array_as_tensor(value), path)}


def _array_as_tensor(array: Any) -> Tensor:
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    with warnings.catch_warnings():  # torch warns of read-only arrays; the tensor is only read
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def decode_torch(tag: str, node: dict[str, Json], tensor: Callable[[str, str], Tensor]) -> Any:
    """The value of a tagged object; ``tensor(key, device)`` returns a tensor of the caller's own.

    Raises ValueError, KeyError or TypeError for JSON that :func:`encode_torch` does not write.
    """
    if tag == "$tensor":
        device = node.get("device", "cpu")
        _require_device(device)
        return tensor(_key(node[tag]), device)
    if tag == "$ndarray":
        return tensor(_key(node[tag]), "cpu").numpy()
    if tag == "$torch.Size":
        return torch.Size(sizes_of(node[tag]))
    if tag == "$torch.device":
        _require_device(node[tag])
        return _device(node[tag])
    if tag in _CONSTANTS:
        return _CONSTANTS[tag][_key(node[tag])]
    raise ValueError(f"unknown tag {tag!r}: written by a newer checkfreq?")


def sizes_of(value: Json) -> tuple[int, ...]:
    """A shape; ValueError for any other JSON, and for a shape that no tensor can have."""
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError("expected a list of sizes")
    num_elements = 1
    for size in value:  # no further than needed: the product of a long list may take hours
        if size >= 2**63 or (num_elements := num_elements * max(size, 1)) >= 2**63:
            raise ValueError("expected the shape of a tensor")
    return tuple(value)


def are_strides(value: Json, shape: tuple[int, ...]) -> bool:
    """Whether it is a list of strides with which no two elements of a tensor share memory, unless
    a whole dimension has stride 0."""
    if not isinstance(value, list) or len(value) != len(shape):
        return False
    if not all(type(stride) is int and 0 <= stride < 2**63 for stride in value):
        return False
    reach = 0  # the largest offset that smaller strides lead to
    for stride, size in sorted(zip(value, shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return reach < 2**63


def _key(value: Json) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a name, got a {type(value).__name__}")
    return value


def is_device(name: Json) -> bool:
    """Whether it is ``cpu``, ``cuda:1`` or the like, whether or not this process has it."""
    if name == "cpu":  # nearly always
        return True
    match = _DEVICE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return False
    return match[1] in _DEVICE_TYPES or match[1] == torch._C._get_privateuse1_backend_name()


def _require_device(name: Json) -> None:
    if name != ON_PARAMETER and not is_device(name):
        raise ValueError(f"expected a device, got {name!r:.80}")


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:  # its backend is not loaded
        raise ValueError(f"this process knows no device {name!r}") from None


def usable_device(name: str) -> torch.device:
    """The recorded device if this process has it, the current one of its type, or the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != kind:
        return torch.device("cpu")
    if index and int(index) < torch.accelerator.device_count():
        return torch.device(kind, int(index))
    return torch.device(kind)
