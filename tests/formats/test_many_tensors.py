"""An import of twice as many tensors takes twice as long, as counted in lines that run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import checkfreq
from checkfreq.formats import from_pretrained


def _num_lines(run: Callable[[], object]) -> int:
    """How many lines of ours ``run`` executes in this thread."""
    count, package = 0, str(Path(checkfreq.__file__).parent)

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename.startswith(package) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def _folder(folder: Path, num: int) -> Callable[[], object]:
    save_file({f"t{n}": torch.zeros(4) for n in range(num)}, folder / "model.safetensors")
    return lambda: from_pretrained(folder, folder / "chk")


def _shards(folder: Path, num: int) -> Callable[[], object]:
    names = {f"t{n}": f"part-{n}.safetensors" for n in range(num)}
    for name, file in names.items():
        save_file({name: torch.zeros(4)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return lambda: from_pretrained(folder, folder / "chk")


@pytest.mark.parametrize("save", [_folder, _shards])
def test_an_import_is_linear_in_the_number_of_tensors(
    save: Callable[[Path, int], Callable[[], object]], tmp_path: Path
) -> None:
    def lines(num: int) -> int:
        folder = tmp_path / str(num)
        folder.mkdir()
        return _num_lines(save(folder, num))

    lines(1)  # imports modules
    assert lines(240) < 2.5 * lines(120)
