"""One object of a checkpoint as one safetensors file, and back.

What is not a tensor (the groups of an optimizer, a counter) is JSON in the file's metadata, under
``checkfreq``, in the form that a manifest has it. Others read the tensors; we read all of it.
"""

from __future__ import annotations

import json
import os
from typing import Any

from torch import Tensor

from checkfreq.errors import CorruptCheckpointError
from checkfreq.formats.exporting import ChkDir, chosen, export, json_of, read_tensor, saved_in
from checkfreq.formats.importing import Imported, Target, commit
from checkfreq.formats.kinds import Ready
from checkfreq.formats.output import require_free, write_file
from checkfreq.formats.safetensors_file import Form, SafetensorsFile, write_tensors
from checkfreq.formats.stand_ins import StandIns
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.saved import SavedObject
from checkfreq.state.tensors import DTYPE_NAMES, DTYPES, sizes_of
from checkfreq.store.fileops import user_path
from checkfreq.types import Json

#: The entry of a file's metadata with what is not a tensor.
_OURS = "checkfreq"


def to_safetensors(
    chk_dir: ChkDir,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    step: int | str | None = None,
    rank: int = 0,
    overwrite: bool = False,
) -> int:
    """Write one object of a checkpoint to a safetensors file; returns the checkpoint's step.

    ``name``: which object; None for the only module. The keys are those of its ``state_dict()``, of
    other objects those in `the on-disk format <format.html>`_. Tied weights are written once;
    ``aliases`` in the metadata has their other names. A dtype that safetensors has no name for is
    written as bytes (``U8``), and known again by `from_safetensors`. One tensor at a time is in
    memory.

    Raises what `checkfreq.load` raises, and ConfigError if ``path`` is there already.
    """
    target = user_path(path)
    require_free(target, overwrite=overwrite)

    def write(found: FoundCheckpoint) -> None:
        where = f"step {found.step} of {chk_dir}"
        saved = saved_in(found, chosen(found, name, rank, path=where), rank, path=where)
        for key in saved.records:
            saved.require(key)
        forms = forms_of(saved)
        described = json.dumps({**json_of(saved), **_unnamed(forms), "step": found.step})
        metadata = {"format": "pt", _OURS: described}
        if saved.aliases:
            metadata["aliases"] = json.dumps(saved.aliases, ensure_ascii=False)
        write_file(
            target,
            lambda stream: write_tensors(
                stream,
                forms,
                lambda key: read_tensor(found, saved.record(key)),
                metadata=metadata,
            ),
            overwrite=overwrite,
        )

    return export(chk_dir, step, rank, write)[0].step


def forms_of(saved: SavedObject) -> list[Form]:
    """The tensors of an object, each once."""
    return [
        Form(key, DTYPES[record.dtype], tuple(record.shape))
        for key, record in saved.records.items()
    ]


def _unnamed(forms: list[Form]) -> dict[str, Json]:
    """Dtypes and shapes of tensors that are written as bytes."""
    found = {
        form.name: [DTYPE_NAMES[form.dtype], list(form.shape)]
        for form in forms
        if not form.is_named
    }
    return {"written_as_bytes": found} if found else {}


def from_safetensors(
    path: str | os.PathLike[str],
    chk_dir: str | os.PathLike[str],
    *,
    name: str = "model",
    like: CFCheckpoint | None = None,
    step: int | None = None,
    overwrite: bool = False,
) -> int:
    """Make a safetensors file a checkpoint with one object, ``name``; returns the step.

    A file of `to_safetensors` becomes the object that it was, at its step unless ``step`` says
    otherwise; any other the weights of a module, at step 0.
    ``like`` is the CFCheckpoint that will restore it, which shows the weights that are tied and in
    the file once. The format has no digests, so damage inside of a tensor is not found.

    Raises as `from_torch_save` does.
    """
    file = SafetensorsFile.open(user_path(path))
    stand_ins = StandIns()
    tensors = file.stand_ins(stand_ins)
    content: Any = tensors
    if _OURS in file.metadata:
        content, saved_step = _ready(file, tensors, stand_ins)
        step = saved_step if step is None else step
    return commit(
        Imported({name: content}, stand_ins=stand_ins), Target(chk_dir, step or 0, like, overwrite)
    )


def _ready(
    file: SafetensorsFile, tensors: dict[str, Tensor], stand_ins: StandIns
) -> tuple[Ready, int]:
    try:
        described = json.loads(file.metadata[_OURS])
        for key, (dtype, shape) in described.pop("written_as_bytes", {}).items():
            form = Form(key, DTYPES[dtype], sizes_of(shape))
            if form.num_bytes != file.forms[key].num_bytes:
                raise ValueError(f"{key!r:.80}: {file.forms[key].num_bytes} bytes")
            tensors[key] = stand_ins.make(form.shape, form.dtype, _viewed(file, form))
        step = described.pop("step")
        if not isinstance(described.get("aliases", {}), dict):
            raise ValueError("aliases: expected an object")
        if not isinstance(described["kind"], str):
            raise ValueError("kind: expected a name")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            str(file.path),
            check=f"metadata {_OURS!r}",
            expected="the JSON of an object",
            got=f"{type(error).__name__}: {error!s:.200}",
        ) from None
    return Ready(described, tensors), step


def _viewed(file: SafetensorsFile, form: Form) -> Any:
    def read() -> Tensor:
        return file.read(form.name).reshape(-1).view(form.dtype).reshape(form.shape)

    return read
