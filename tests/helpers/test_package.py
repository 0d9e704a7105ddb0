"""The package's names, and what importing it does not import."""

from __future__ import annotations

import subprocess
import sys


def test_torch_is_imported_only_by_what_needs_it(tmp_path: object) -> None:
    program = (
        "import sys\n"
        "from checkfreq.helpers import AtomicDirectory, Metrics, Timer, atomic_save\n"
        "metrics, saver = Metrics(), AtomicDirectory(sys.argv[1])\n"
        "metrics.update({'loss': 1.0})\n"
        "assert metrics.end_epoch()['loss'].sum == 1.0\n"
        "saver.atomic_symlink(saver.prepare_checkpoint_directory())\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
