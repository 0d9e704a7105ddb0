"""A share of the data in memory: which samples, how they are held, and that it resumes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, default_collate

from checkfreq.examples.imagenet.models import import_torchvision
from iterators import (
    CFIterator,
    NotResumableError,
    ResidentDataset,
    ResumableDataLoader,
    ResumeMismatchError,
)
from iterators.testing import check_resumable, digest
from tests.iterators.datasets import Plain


class Pairs(Dataset[Any]):
    """Sample ``i`` is a tensor full of ``i``, and the label ``i % 3``; counts what is read."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        return torch.full((2, 3), float(index)), index % 3


class Sized(Dataset[Any]):
    """Holds what it was given."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples_ = samples

    def __len__(self) -> int:
        return len(self.samples_)

    def __getitem__(self, index: int) -> Any:
        return self.samples_[index]


def plus_noise(inputs: torch.Tensor) -> torch.Tensor:
    return inputs + torch.rand(inputs.shape)


# Shares


@given(st.integers(1, 60), st.integers(1, 6), st.floats(0, 1))
def test_shares_cover_everything_and_are_disjoint_unless_they_are_to_be_larger(
    n: int, world: int, extra: float
) -> None:
    if n < world:
        return
    for share in (None, 1 / world + (1 - 1 / world) * extra):
        held = [
            ResidentDataset(Plain(n), rank=rank, world=world, share=share).global_ids
            for rank in range(world)
        ]
        assert set(np.concatenate(held).tolist()) == set(range(n))
        assert share or len(np.concatenate(held)) == n
        for ids in held:
            assert len(np.unique(ids)) == len(ids)
            assert -1 < len(ids) - n * (share or 1 / world) < 1
    whole = ResidentDataset(Plain(n), rank=world - 1, world=world, share=1.0)
    assert list(whole) == list(range(n))


def test_data_sorted_by_class_is_not_shared_out_by_class() -> None:
    for rank in range(4):
        ids = ResidentDataset(Plain(400), rank=rank, world=4).global_ids
        assert np.all(np.bincount(ids // 100, minlength=4) > 10)


# Holding


def test_samples_are_read_and_transformed_once() -> None:
    source = Pairs(7)
    resident = ResidentDataset(
        source, rank=1, world=2, load_transform=torch.neg, transform=torch.abs, device="cpu"
    )
    for _ in range(2):
        for place, one in enumerate(resident.global_ids.tolist()):
            inputs, label = resident[place]
            assert torch.equal(inputs, torch.full((2, 3), float(one)))
            assert label == one % 3
    assert source.read == resident.global_ids.tolist()


def test_stacked_samples_and_batches_are_those_of_the_default_collate() -> None:
    samples = [(torch.full((2,), i), i, i / 2, np.float32(i), np.arange(3) + i) for i in range(5)]
    resident = ResidentDataset(Sized(samples), device="cpu")
    listed = ResidentDataset(Sized(samples))
    for chosen in ([3, 0, 3], [4]):
        wanted = default_collate([samples[one] for one in chosen])
        for held in (resident, listed):
            loader = DataLoader(held, batch_sampler=[chosen], collate_fn=ResidentDataset.collate)
            (found,) = loader
            assert digest(found) == digest(wanted)
        (found,) = DataLoader(resident, batch_sampler=[chosen])
        assert digest(found) == digest(wanted)


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(["cat/b.png", "cat/a.PNG", "cat/deep/c.png", "dog/a.bmp"]):
        path = tmp_path / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (3, 2), (number, 10 * number, 7)).save(path)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "list.txt").write_text("no class")
    return tmp_path / "train"


def test_a_folder_holds_what_torchvisions_does(folder: Path) -> None:
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    theirs = import_torchvision().datasets.ImageFolder(str(folder))
    ours = ResidentDataset.from_folder(folder)
    assert list(ours.classes) == theirs.classes
    assert [(image.tobytes(), label) for image, label in ours] == [
        (image.tobytes(), label) for image, label in theirs
    ]


def test_a_moved_folder_is_the_same_data_and_a_renamed_file_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(root: str | Path) -> str:
        return ResidentDataset.from_folder(root, loader=str).data_fingerprint()

    before = name(folder)
    monkeypatch.chdir(folder.parent)
    moved = folder.rename(folder.parent / "moved")
    assert name("./moved/") == name(moved) == before
    (moved / "cat" / "b.png").rename(moved / "cat" / "d.png")
    assert name(moved) != before


def test_folders_without_images_are_refused_and_without_pil_a_loader_is_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="contains no class folder"):
        ResidentDataset.from_folder(tmp_path / "empty", loader=str)
    (tmp_path / "empty" / "cat").mkdir()
    with pytest.raises(FileNotFoundError, match=r"cat contains no image"):
        ResidentDataset.from_folder(tmp_path / "empty", loader=str)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match="install pillow, or pass loader="):
        ResidentDataset.from_folder(folder)
    share = ResidentDataset.from_folder(folder, loader=str, rank=1, world=2)
    assert len(share) == 2


# Resuming


def iterated(resident: ResidentDataset, **settings: Any) -> CFIterator:
    return CFIterator(
        ResumableDataLoader(resident, 4, shuffle=True, rank=0, world=1, seed=2, **settings)
    )


@pytest.mark.parametrize(
    ("device", "transform", "share"), [(None, plus_noise, None), ("cpu", None, 0.8)]
)
def test_every_state_resumes_exactly(device: Any, transform: Any, share: float | None) -> None:
    resident = ResidentDataset(
        Pairs(11), rank=1, world=2, share=share, transform=transform, device=device
    )
    check_resumable(
        lambda: iterated(resident, collate_fn=resident.collate),
        make_resumed=lambda: iterated(resident, num_workers=1),
    )


def test_a_position_of_a_different_share_is_refused() -> None:
    state = iterated(ResidentDataset(Plain(20), rank=0, world=2)).state_dict()
    for other in ({"rank": 1, "world": 2}, {"rank": 0, "world": 2, "share": 0.6}):
        with pytest.raises(ResumeMismatchError):
            iterated(ResidentDataset(Plain(20), **other)).load_state_dict(state)
    iterated(ResidentDataset(Plain(20), rank=0, world=2, share=0.5)).load_state_dict(state)


# Refusals


@pytest.mark.parametrize(
    ("dataset", "share", "rank", "world", "reason"),
    [
        (Plain(9), 0.49, 0, 2, r"share must lie in \[1 / world, 1\] = \[0.5, 1\]"),
        (Plain(3), None, 0, 4, "3 samples are too few for 4 ranks"),
        (object(), None, None, None, "has no length"),
    ],
)
def test_shares_and_data_that_cannot_be_are_refused(
    dataset: Any, share: Any, rank: Any, world: Any, reason: str
) -> None:
    with pytest.raises((ValueError, NotResumableError), match=reason):
        ResidentDataset(dataset, rank=rank, world=world, share=share)


def test_samples_that_do_not_stack_are_refused_naming_both() -> None:
    for first, second, named in (
        (torch.zeros(2), torch.zeros(3), r"sample 1 is \[\(\(3,\), .*sample 0 is \[\(\(2,\), "),
        (("text", 1), ("more", 1), "a str cannot be stacked on a device"),
    ):
        with pytest.raises(ValueError, match=named):
            ResidentDataset(Sized([first, second]), device="cpu")
