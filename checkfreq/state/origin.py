"""Who saved extra state: a code over it that only this user can have made.

A restore gives extra state to ``set_extra_state()``, code of the user's that may do anything with
it: that of TransformerEngine unpickles it. So a checkpoint says with each which key it was saved
under, by an HMAC; the key is a file in the user's home that no checkpoint holds.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import hmac
import json
import logging
import os
import secrets
from pathlib import Path

from torch import Tensor

from checkfreq.errors import ConfigError
from checkfreq.state.codec import encode_tree
from checkfreq.state.composed import is_composed, take_apart
from checkfreq.state.dtensors import is_dtensor
from checkfreq.state.tensors import encode_torch
from checkfreq.store.fileops import LocalFileOps, write_all
from checkfreq.types import Json

logger = logging.getLogger(__name__)

_KEY_BYTES = 32


def code_of(value: object, name: str) -> str:
    """The code of the extra state ``name``; "" if this user can have no key.

    Of DTensors it says the shape and the type alone: what a rank holds of them depends on how many
    there are.
    """
    key = _key(_key_path())
    if key is None:
        return ""

    def digest(tensor: Tensor, path: str) -> str:
        return hashlib.sha256(_content(tensor, path)).hexdigest()

    def leaf(inner: object, path: str) -> dict[str, Json] | None:
        if isinstance(inner, Tensor):  # on whatever device
            return {"$tensor": digest(inner, path)}
        return encode_torch(inner, path, digest)

    text = json.dumps([name, encode_tree(value, name, leaf=leaf)])
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def require_own(code: object, value: object, name: str, *, where: str) -> None:
    """Raise ConfigError unless ``code`` is that of ``value``, made by this user."""
    own = code_of(value, name)
    if own and code == own:
        return
    raise ConfigError(
        f"{name} is not given to set_extra_state(), which is code of yours and may unpickle it: "
        f"{where} was not written with this user's key, {_key_path()}, but by another user, by an "
        "import, on a machine with another home directory, or in a container whose home is gone. "
        "Nothing was changed. If you trust whoever wrote it, restore with "
        "CFConfig(trust_extra_state=True); checkfreq.load() without into= reads it and runs nothing"
    )


def _content(tensor: Tensor, path: str) -> bytes:
    head = f"{tensor.dtype} {[*tensor.shape]} ".encode()
    if is_dtensor(tensor):
        return head
    if is_composed(tensor):
        record, parts = take_apart(tensor, path)
        contents = (_content(part, path) for _, part in sorted(parts.items()))
        return b"".join([head, json.dumps(record, sort_keys=True).encode(), *contents])
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return head + ctypes.string_at(plain.data_ptr(), plain.nbytes)


def _key_path() -> Path:
    folder = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(folder), "checkfreq", "key")


@functools.cache
def _key(path: Path) -> bytes | None:
    """The key of this user, made if there is none; None where that is not possible."""
    ops = LocalFileOps(path.parent)
    try:
        # The working directory may be anybody's: a "~" there, or a folder by a relative path.
        if not path.is_absolute():
            raise NotADirectoryError("expected a home directory, or XDG_STATE_HOME from /")
        ops.mkdir(path.parent, parents=True)
        fd = ops.open_to_lock(path)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() and status.st_mode & 0o077:
                raise PermissionError(f"it is user {status.st_uid}'s, and others may read it")
            fcntl.flock(fd, fcntl.LOCK_EX)  # ranks may start at once
            if len(key := os.pread(fd, _KEY_BYTES, 0)) == _KEY_BYTES:
                return key
            os.ftruncate(fd, 0)
            write_all(fd, key := secrets.token_bytes(_KEY_BYTES))
            ops.sync_file(path)
        finally:
            os.close(fd)
    except OSError as error:
        logger.warning(
            "%s cannot be made (%s), so a later run does not know that extra state of modules was "
            "saved by you, and gives none to set_extra_state(): set "
            "CFConfig(trust_extra_state=True) in it",
            path,
            error,
        )
        return None
    logger.log(
        logging.WARNING if _is_in_container() else logging.INFO,
        "%s was made: by it later runs know the extra state of modules that you saved. Where the "
        "home directory is not kept, as in most containers, or differs between nodes, set "
        "CFConfig(trust_extra_state=True) in the runs that restore",
        path,
    )
    return key


def _is_in_container() -> bool:
    """Whether this is a container of Docker, Podman or Kubernetes; Apptainer keeps the home."""
    marks = (Path("/.dockerenv"), Path("/run/.containerenv"))
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(mark.exists() for mark in marks)
