"""What programs of users read, or people: compared with what it was, in ``tests/cli/golden``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "golden"


def compare(name: str, found: Any) -> None:
    """Fail unless ``found`` is as recorded. CHECKFREQ_GOLDEN=1 records it anew."""
    path = _FOLDER / f"{name}.json"
    text = json.dumps(_rounded(found), indent=1) + "\n"
    if os.environ.get("CHECKFREQ_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert json.loads(text) == json.loads(path.read_text())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
