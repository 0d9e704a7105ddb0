"""Any plain state as JSON, and back to equal values: what a dataset's ``state_dict`` may hold.

JSON's own values stand for themselves. Tuples, bytes, dictionaries with other keys than text,
infinities and NaN, huge integers, NumPy arrays and scalars, and torch tensors become a dictionary
with the key ``"$"``. Nothing is pickled, so loading a state runs no code. Any process.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Json: TypeAlias = Any

_TAG = "$"
_LARGEST_PLAIN = 64  # bits; Python converts integers of more than 4,300 digits only as hex
_KINDS = "?biufcmMSUV"
#: NumPy's names of dtypes of those kinds; bytes taken for object pointers would crash the process.
_DTYPE = re.compile(r"[<>|=]([?biufcSUV][0-9]{1,9}|[mM]8(\[[0-9]{0,9}[A-Za-z\u03bc]{1,7}\])?)")


def dumps(state: object) -> str:
    """``state`` as ASCII text; ``TypeError`` names the first value in it that cannot be saved."""
    return json.dumps(encode(state), allow_nan=False, separators=(",", ":"))


def loads(text: str) -> Any:
    """The state that ``dumps`` wrote; ``ValueError`` for any other text."""
    try:
        return decode(json.loads(text))
    except RecursionError:
        raise ValueError("not an encoded state: nested too deeply") from None


def encode(state: object, *, path: str = "state") -> Json:
    """``state`` in JSON's types; ``path`` is what it is called in the ``TypeError``."""
    if state is None or type(state) in (bool, str):
        return state
    if type(state) in _ENCODERS:
        return _ENCODERS[type(state)](state, path)
    if isinstance(state, np.ndarray) and type(state) is not np.ndarray:
        raise TypeError(_refusal(state, path))
    if isinstance(state, (np.ndarray, np.generic)):
        return _from_array(state, path)
    if _is_tensor(state):
        return _from_tensor(state, path)
    raise TypeError(_refusal(state, path))


def decode(value: Json) -> Any:
    """The state that ``encode`` was given; ``ValueError`` if ``value`` did not come from it."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {name: decode(one) for name, one in value.items()}
    try:
        return _DECODERS[value[_TAG]](value)
    except _MALFORMED as error:
        raise ValueError(f"not an encoded {value[_TAG]!r:.80}: {error!s:.200}") from error


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error)


def _refusal(state: object, path: str) -> str:
    return (
        f"{path} is a {type(state).__name__}, which cannot be saved in a position. A state may "
        "hold None, bool, int, float, str, bytes, lists, tuples, dictionaries, plain NumPy arrays "
        "and torch tensors on the CPU"
    )


# Python's own


def _from_int(state: int, path: str) -> Json:
    if state.bit_length() <= _LARGEST_PLAIN:
        return state
    return {_TAG: "int", "hex": hex(state)}


def _from_float(state: float, path: str) -> Json:
    if math.isfinite(state):
        return state
    return {_TAG: "float", "hex": struct.pack(">d", state).hex()}


def _from_list(state: list[Any], path: str) -> Json:
    return [encode(one, path=f"{path}[{index}]") for index, one in enumerate(state)]


def _from_tuple(state: tuple[Any, ...], path: str) -> Json:
    return {_TAG: "tuple", "items": _from_list(list(state), path)}


def _from_bytes(state: bytes, path: str) -> Json:
    return {_TAG: "bytes", "base64": _to_base64(state)}


def _from_dict(state: dict[Any, Any], path: str) -> Json:
    values = {name: encode(one, path=f"{path}[{name!r}]") for name, one in state.items()}
    if all(type(name) is str for name in state) and _TAG not in state:
        return values
    keys = [encode(name, path=f"a key of {path}") for name in state]
    return {_TAG: "dict", "items": [list(item) for item in zip(keys, values.values(), strict=True)]}


_ENCODERS: dict[type, Callable[[Any, str], Json]] = {
    int: _from_int,
    float: _from_float,
    list: _from_list,
    tuple: _from_tuple,
    bytes: _from_bytes,
    dict: _from_dict,
}


# Arrays


def _from_array(state: NDArray[Any] | np.generic, path: str) -> Json:
    if not _is_plain(state.dtype):
        raise TypeError(f"{path} is an array of {state.dtype}, which cannot be saved in a position")
    return {
        _TAG: "array" if isinstance(state, np.ndarray) else "scalar",
        "dtype": state.dtype.str,
        "shape": list(state.shape),
        "base64": _to_base64(state.tobytes()),
    }


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _KINDS and not dtype.names and not dtype.subdtype


def _to_array(value: dict[str, Json]) -> NDArray[Any]:
    """Writable, like the one that was saved."""
    shape = _shape(value)
    if not isinstance(value["dtype"], str) or _DTYPE.fullmatch(value["dtype"]) is None:
        raise ValueError(f"dtype {value['dtype']!r:.80}")
    dtype = np.dtype(value["dtype"])
    content = _content(value, math.prod(shape) * dtype.itemsize)
    return np.ndarray(shape, dtype, buffer=content)


def _is_tensor(state: object) -> bool:
    """A tensor can only have come from an imported torch; otherwise do not import it."""
    return "torch" in sys.modules and type(state) is sys.modules["torch"].Tensor


def _from_tensor(state: Any, path: str) -> Json:
    torch = sys.modules["torch"]
    if state.device.type != "cpu" or state.layout is not torch.strided or state.is_quantized:
        raise TypeError(f"{path} is a tensor on {state.device} ({state.layout}): save a dense copy")
    plain = state.detach().resolve_conj().resolve_neg().contiguous()
    return {
        _TAG: "tensor",
        "dtype": str(state.dtype).removeprefix("torch."),
        "shape": list(state.shape),
        "base64": _to_base64(plain.reshape(-1).view(torch.uint8).numpy().tobytes()),
    }


def _to_tensor(value: dict[str, Json]) -> Any:
    import torch

    dtypes = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    dtype, shape = dtypes[f"torch.{value['dtype']}"], _shape(value)
    content = _content(value, math.prod(shape) * dtype.itemsize)  # before there is room for it
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if content:
        tensor.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(content, dtype=torch.uint8))
    return tensor


def _shape(value: dict[str, Json]) -> tuple[int, ...]:
    sizes = tuple(value["shape"])
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("expected a list of sizes")
    if math.prod(max(size, 1) for size in sizes) >= 2**63:
        raise ValueError("expected the shape of an array")
    return sizes


def _to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _content(value: dict[str, Json], size: int) -> bytearray:
    content = bytearray(base64.b64decode(value["base64"], validate=True))
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes, expected {size}")
    return content


_DECODERS: dict[str, Callable[[dict[str, Json]], Any]] = {
    "int": lambda value: int(value["hex"], 16),
    "float": lambda value: struct.unpack(">d", bytes.fromhex(value["hex"]))[0],
    "tuple": lambda value: tuple(decode(one) for one in value["items"]),
    "bytes": lambda value: base64.b64decode(value["base64"], validate=True),
    "dict": lambda value: {decode(name): decode(one) for name, one in value["items"]},
    "array": _to_array,
    "scalar": lambda value: _to_array(value)[()],
    "tensor": _to_tensor,
}
