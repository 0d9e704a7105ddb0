"""Checkpoints in a lower layer of an overlay, where a directory cannot be renamed. Needs root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq import KeepLast
from checkfreq.store.store import CheckpointStore
from tests.acceptance.disks import call
from tests.contract.runs import Training, managed, written

pytestmark = [pytest.mark.crash, pytest.mark.more]


@pytest.fixture
def chk_dir(tmp_path: Path) -> Iterator[Path]:
    """Steps 1 to 4 in the lower layer of an image, as `docker commit` or COPY leaves them."""
    layers, merged = tmp_path / "layers", tmp_path / "merged"
    for path in (layers, merged):
        path.mkdir()
    try:
        call("mount", "-t", "tmpfs", "tmpfs", str(layers))
    except OSError as error:
        pytest.skip(f"this machine cannot mount: {error}")
    try:
        for name in ("lower", "upper", "work"):
            (layers / name).mkdir()
        written(layers / "lower" / "chk", 4, retention=KeepLast(10))
        places = [f"{name}dir={layers / name}" for name in ("lower", "upper", "work")]
        options = ",".join([*places, "redirect_dir=off"])
        try:
            call("mount", "-t", "overlay", "overlay", "-o", options, str(merged))
        except OSError as error:
            pytest.skip(f"this machine cannot mount an overlay: {error}")
        try:
            with pytest.raises(OSError, match="cross-device"):  # or this would show nothing
                (merged / "chk" / "step-00000001").rename(merged / "chk" / "step-00000009")
            yield merged / "chk"
        finally:
            call("umount", str(merged))
    finally:
        call("umount", str(layers))


def test_checkpoints_of_a_lower_layer_are_set_aside_and_removed(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=1, retention=KeepLast(2)) as manager:
        assert manager.restore(step=2)
        for _ in range(2):
            training.steps(manager, 1)
            manager.wait()
        assert manager.stats()["num_failed"] == 0
    assert CheckpointStore(chk_dir).steps() == [3, 4]
    assert not list(chk_dir.glob(".*tmp*"))
    aside = CheckpointStore(chk_dir / "superseded")
    assert [aside.verify(step).step for step in aside.steps()] == [3, 4]
