"""A run's identity: a random name in ``mirror.json`` in its checkpoint directory.

A claim in an object store that bears it is this directory's own, and need not be waited out.
"""

from __future__ import annotations

import json
import logging
import re
import uuid

from checkfreq.store.store import CheckpointStore

logger = logging.getLogger(__name__)

_NAME = "mirror.json"
_MAX_BYTES = 4096
_RUN = re.compile(r"[0-9a-f]{32}")


def run_identity(store: CheckpointStore) -> str:
    """The identity of the run in this directory, made at its first use. For the lock's holder."""
    path = store.root / _NAME
    try:
        run = json.loads(store.ops.read_bytes(path, max_bytes=_MAX_BYTES))["run"]
        if isinstance(run, str) and _RUN.fullmatch(run):
            return run
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, RecursionError):
        logger.warning("%s is damaged; the run gets a new identity", path)
    run = uuid.uuid4().hex
    store.ops.replace_file(path, f"{json.dumps({'run': run})}\n".encode())
    store.ops.sync_dir(store.root)
    return run
