"""A share of the data in memory: which samples, how they are held, and that it resumes."""

from __future__ import annotations

import pickle
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from checkfreq.examples.imagenet.models import import_torchvision
from iterators import (
    CFIterator,
    NotResumableError,
    ResidentDataset,
    ResumableDataLoader,
    ResumableSampler,
    ResumeMismatchError,
)
from iterators.order.batch_requests import fetches_by_batch
from iterators.order.fingerprint import dataset_fingerprint
from iterators.testing import check_resumable, digest, walk
from tests.iterators.datasets import Augmented, Plain


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


@given(st.integers(1, 60), st.integers(1, 6))
def test_default_shares_are_disjoint_and_equal_to_within_one(n: int, world: int) -> None:
    if n < world:
        return
    shares = [
        ResidentDataset(Plain(n), rank=rank, world=world).global_ids.tolist()
        for rank in range(world)
    ]
    assert sorted(chain.from_iterable(shares)) == list(range(n))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 60), st.integers(1, 6), st.floats(0, 1))
def test_larger_shares_overlap_and_cover_everything(n: int, world: int, extra: float) -> None:
    if n < world:
        return
    share = 1 / world + (1 - 1 / world) * extra
    held = [
        ResidentDataset(Plain(n), rank=rank, world=world, share=share).global_ids
        for rank in range(world)
    ]
    assert set(np.concatenate(held).tolist()) == set(range(n))
    for ids in held:
        assert len(np.unique(ids)) == len(ids)
        assert -1 < len(ids) - n * share < 1
        assert ids.dtype == np.int64


def test_the_whole_share_is_the_whole_dataset_in_its_order() -> None:
    for rank in range(3):
        resident = ResidentDataset(Plain(7), rank=rank, world=3, share=1.0)
        assert list(resident) == list(range(7))


def test_data_sorted_by_class_is_not_shared_out_by_class() -> None:
    for rank in range(4):
        ids = ResidentDataset(Plain(400), rank=rank, world=4).global_ids
        assert np.all(np.bincount(ids // 100, minlength=4) > 10)


def test_the_process_group_gives_rank_and_world() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert len(ResidentDataset(Plain(5))) == 5
    finally:
        dist.destroy_process_group()


# Holding


@pytest.mark.parametrize("device", [None, "cpu"])
def test_samples_are_read_and_transformed_once(device: str | None) -> None:
    source = Pairs(7)
    resident = ResidentDataset(
        source, rank=1, world=2, load_transform=torch.neg, transform=torch.abs, device=device
    )
    assert source.read == sorted(source.read, key=resident.global_ids.tolist().index)
    for _ in range(2):
        for place, one in enumerate(resident.global_ids.tolist()):
            inputs, label = resident[place]
            assert torch.equal(inputs, torch.full((2, 3), float(one)))
            assert label == one % 3
    assert len(source.read) == len(resident) == 4


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


def test_samples_that_are_not_tuples_are_one_tensor() -> None:
    resident = ResidentDataset(Plain(5), device="cpu", load_transform=lambda one: one * 2)
    (batch,) = DataLoader(resident, batch_size=5, collate_fn=resident.collate)
    assert torch.equal(batch, torch.arange(0, 10, 2))
    assert resident[2] == 4


def test_batches_are_fetched_whole_only_where_nothing_is_done_to_each_sample() -> None:
    assert fetches_by_batch(ResidentDataset(Pairs(4), device="cpu"))
    assert fetches_by_batch(Subset(ResidentDataset(Pairs(4), device="cpu"), [0, 1]))
    assert not fetches_by_batch(ResidentDataset(Pairs(4)))
    assert not fetches_by_batch(ResidentDataset(Pairs(4), device="cpu", transform=plus_noise))


def test_a_random_transform_is_seeded_per_sample() -> None:
    resident = ResidentDataset(Pairs(9), device="cpu", transform=plus_noise)

    def samples(batch: int) -> list[str]:
        loader = ResumableDataLoader(resident, batch, shuffle=True, collate_fn=list)
        return [digest(one) for part in loader.open(epoch=1, start=0) for one in part.data]

    assert samples(2) == samples(5)


def test_samples_of_any_kind_are_held_without_a_device() -> None:
    samples = [{"text": "a"}, {"text": "bc"}]
    assert list(ResidentDataset(Sized(samples))) == samples


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


def test_a_folder_is_stacked_through_the_load_transform(folder: Path) -> None:
    resident = ResidentDataset.from_folder(
        folder, rank=0, world=1, load_transform=np.array, device="cpu"
    )
    images, labels = next(iter(DataLoader(resident, 4, collate_fn=resident.collate)))
    assert (images.shape, images.dtype) == ((4, 2, 3, 3), torch.uint8)
    assert labels.tolist() == [0, 0, 0, 1]


def test_a_folder_is_read_by_the_users_loader_for_its_share_alone(folder: Path) -> None:
    read: list[str] = []
    resident = ResidentDataset.from_folder(
        folder, loader=lambda path: read.append(path) or path, rank=1, world=2
    )
    assert [path for path, _ in resident] == read
    assert len(read) == 2


def test_a_moved_folder_is_the_same_data_and_a_renamed_file_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(root: str) -> str:
        return ResidentDataset.from_folder(root, loader=str).data_fingerprint()

    before = name(str(folder))
    monkeypatch.chdir(folder.parent)
    assert name("./train") == name("train/") == before
    moved = folder.rename(folder.parent / "moved")
    assert name(str(moved)) == before
    (moved / "cat" / "b.png").rename(moved / "cat" / "d.png")
    assert name(str(moved)) != before


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="contains no class folder"):
        ResidentDataset.from_folder(tmp_path, loader=str)
    (tmp_path / "cat").mkdir()
    with pytest.raises(FileNotFoundError, match=r"cat contains no image"):
        ResidentDataset.from_folder(tmp_path, loader=str)


def test_without_pil_a_loader_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match="install pillow, or pass loader="):
        ResidentDataset.from_folder(folder)
    assert len(ResidentDataset.from_folder(folder, loader=str)) == 4


# Resuming


def iterated(resident: ResidentDataset, **settings: Any) -> CFIterator:
    return CFIterator(
        ResumableDataLoader(resident, 4, shuffle=True, rank=0, world=1, seed=2, **settings)
    )


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("transform", [None, plus_noise])
@pytest.mark.parametrize("share", [None, 0.8])
def test_every_state_resumes_exactly(device: Any, transform: Any, share: float | None) -> None:
    for rank in range(2):
        resident = ResidentDataset(
            Pairs(21), rank=rank, world=2, share=share, transform=transform, device=device
        )
        check_resumable(lambda: iterated(resident, collate_fn=resident.collate))  # noqa: B023


def test_every_state_resumes_exactly_with_workers() -> None:
    resident = ResidentDataset(Pairs(10), device="cpu")
    check_resumable(
        lambda: iterated(resident, collate_fn=resident.collate),
        make_resumed=lambda: iterated(resident, num_workers=1),
    )


def test_the_ranks_together_serve_every_sample_once_an_epoch() -> None:
    seen: list[int] = []
    for rank in range(3):
        resident = ResidentDataset(Pairs(20), rank=rank, world=3, device="cpu")
        for one in walk(iterated(resident), epochs=1):
            assert one.ids is not None
            seen += resident.global_ids[list(one.ids)].tolist()
    assert sorted(seen) == list(range(20))


def test_a_sampler_of_ours_walks_it() -> None:
    resident = ResidentDataset(Pairs(12), rank=1, world=2, device="cpu")
    sampler = ResumableSampler(resident, seed=5)
    loader = DataLoader(resident, 4, sampler=sampler, collate_fn=resident.collate)
    first = next(iter(loader))
    sampler.advance(4)
    rest = list(loader)
    inputs = torch.cat([batch[0][:, 0, 0] for batch in (first, *rest)])
    assert sorted(inputs.tolist()) == resident.global_ids.tolist()


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 1, "world": 2},
        {"rank": 0, "world": 2, "share": 0.6},
        {"rank": 0, "world": 1},
    ],
)
def test_a_position_of_a_different_share_is_refused(other: dict[str, Any]) -> None:
    state = iterated(ResidentDataset(Plain(20), rank=0, world=2)).state_dict()
    with pytest.raises(ResumeMismatchError):
        iterated(ResidentDataset(Plain(20), **other)).load_state_dict(state)
    iterated(ResidentDataset(Plain(20), rank=0, world=2, share=0.5)).load_state_dict(state)


def test_other_data_has_a_different_fingerprint() -> None:
    one, other = (ResidentDataset(kind(4)) for kind in (Plain, Augmented))
    assert one.data_fingerprint() != other.data_fingerprint()
    assert dataset_fingerprint(one) == one.data_fingerprint()


def test_it_pickles_with_its_stacks() -> None:
    resident = pickle.loads(pickle.dumps(ResidentDataset(Pairs(5), device="cpu")))
    assert torch.equal(resident[3][0], torch.full((2, 3), 3.0))


# Refusals


@pytest.mark.parametrize("share", [0, -0.5, 0.49, 1.01, float("nan")])
def test_a_share_that_leaves_samples_out_or_passes_the_whole_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"share must lie in \[1 / world, 1\] = \[0.5, 1\]"):
        ResidentDataset(Plain(9), rank=0, world=2, share=share)


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="3 samples are too few for 4 ranks"):
        ResidentDataset(Plain(3), rank=0, world=4)
    with pytest.raises(ValueError, match="Plain is empty"):
        ResidentDataset(Plain(0))


def test_a_bad_rank_and_a_dataset_without_a_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rank must lie in"):
        ResidentDataset(Plain(3), rank=2, world=2)
    with pytest.raises(NotResumableError, match="has no length"):
        ResidentDataset(object())


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (torch.zeros(3), r"sample 1 is \[\(\(3,\), .*sample 0 is \[\(\(2,\), "),
        (torch.zeros(2, dtype=torch.int64), "torch.int64.*torch.float32"),
        ((torch.zeros(2), 1), "sample 1 is"),
    ],
)
def test_samples_that_do_not_stack_are_refused_naming_both(second: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ResidentDataset(Sized([torch.zeros(2), second]), device="cpu")


def test_a_value_that_is_no_tensor_is_refused_on_a_device() -> None:
    with pytest.raises(ValueError, match="a str cannot be stacked on a device"):
        ResidentDataset(Sized([("text", 1)]), device="cpu")
    for data in (TensorDataset(torch.arange(3)), Sized([[torch.zeros(1), 2]])):
        assert len(ResidentDataset(data, device="cpu")[0]) == len(data[0])
