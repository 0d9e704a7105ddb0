"""What ``export``, ``import`` and ``convert`` share: which format is meant, and the conversion."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import step_number
from checkfreq.errors import ConfigError
from checkfreq.mirror.settings import is_url
from checkfreq.store.fileops import LocalFileOps
from checkfreq.store.store import step_of

#: What `kind_of` calls our own directories.
CHECKPOINTS = "checkpoints"
#: The formats by the name that a user gives, and the end of the names of our functions for them.
FORMATS = {"torch-save": "torch_save", "dcp": "dcp", "safetensors": "safetensors"}
FORMATS["pretrained"] = "pretrained"
_ENDINGS = {".pt": "torch_save", ".pth": "torch_save", ".bin": "torch_save", ".ckpt": "torch_save"}
_ENDINGS[".safetensors"] = "safetensors"
#: Formats whose files hold one object.
_OF_ONE = ("safetensors", "pretrained")


to_option = click.option(
    "--to", type=click.Choice([*FORMATS]), help="The format of TARGET, if its name does not say it."
)


@dataclass(frozen=True, slots=True)
class Converted:
    """What was read and written; ``form`` is the format on the other side."""

    source: str
    target: str
    step: int
    form: str
    is_export: bool

    def tell(self, *, as_json: bool) -> None:
        """Print it."""
        if as_json:
            print(text.json_of(asdict(self), indent=None))
        elif self.is_export:
            print(f"step {self.step} of {self.source} is in {self.target}")
        else:
            print(f"{self.source} is step {self.step} of {self.target}")


def export(
    source: str, target: str, *, to: str | None, step: str | None, name: str | None, overwrite: bool
) -> Converted:
    """Write a checkpoint as a file or folder of another library."""
    form = _target_format(target, to)
    options: dict[str, Any] = {"overwrite": overwrite}
    if name is not None and form != "dcp":
        options["name"] = name
    written = _formats(f"to_{form}")(source, target, step=_step(step, best=True), **options)
    return Converted(source, target, written, form, is_export=True)


def import_(
    source: str, target: str, *, step: str | None, name: str | None, overwrite: bool
) -> Converted:
    """Write what another library saved as a checkpoint."""
    form = kind_of(source)
    options: dict[str, Any] = {"overwrite": overwrite}
    if name is not None and form in _OF_ONE:
        options["name"] = name
    elif name is not None:
        options["names"] = {name: name}
    if step is not None:
        options["step"] = _step(step, best=False)
    written = _formats(f"from_{form}")(source, target, **options)
    return Converted(source, target, written, form, is_export=False)


def _formats(function: str) -> Any:
    """By name, since the command line runs without torch until it needs it."""
    return getattr(importlib.import_module("checkfreq.formats"), function)


def kind_of(source: str) -> str:
    """The format of what is there; `CHECKPOINTS` for ours."""
    if is_url(source):
        return CHECKPOINTS
    path = Path(source).absolute()
    ops = LocalFileOps(path)  # follows a link to the folder
    if not ops.is_dir(path):
        return _ENDINGS.get(path.suffix, "torch_save")
    names = ops.listdir(path)
    if "manifest.json" in names or any(step_of(name) is not None for name in names):
        return CHECKPOINTS
    if ".metadata" in names:
        return "dcp"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "pretrained"
    raise ConfigError(
        f"{source}: expected checkpoints, a folder of dcp.save or one of save_pretrained, found "
        "none of them"
    )


def _target_format(target: str, given: str | None) -> str:
    if given is not None:
        return FORMATS[given]
    found = _ENDINGS.get(Path(target).suffix)
    if found is None:
        raise ConfigError(
            f"{target}: expected a name that ends in {', '.join(_ENDINGS)}; or pass --to dcp or "
            "--to pretrained for a folder"
        )
    return found


def _step(given: str | None, *, best: bool) -> int | str | None:
    if given is None or (best and given.startswith("best:")):
        return given
    try:
        return step_number(given)
    except ValueError:
        raise ConfigError(f"--step {given}: expected a step such as 1200") from None
