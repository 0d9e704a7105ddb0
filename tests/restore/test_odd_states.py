"""Tensors that are more than their bytes, lists, nested containers: exact, or refused by name."""

from __future__ import annotations

import json
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import CorruptCheckpointError, MismatchError, StateError
from checkfreq.state.composed import is_composed, take_apart
from checkfreq.store.manifest import MANIFEST_NAME
from tests.state.support import bits, plan, restore, take

# torch's own, where one of these is made: in beta, a prototype, experimental, deprecated.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*(support is in beta|prototype|experimental|invariant checks|quantize)"
)


def odd_bits(value: Any) -> Any:
    """Everything that must be equal about a value with composed tensors in it."""
    if isinstance(value, Tensor) and is_composed(value):
        record, parts = take_apart(value, "value")
        return [json.dumps(record), {name: odd_bits(part) for name, part in parts.items()}]
    if isinstance(value, dict):
        return {key: odd_bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(odd_bits, value)]
    return bits(value)


def dense(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(4, 6, generator=generator)
    return matrix * (torch.rand(4, 6, generator=generator) > 0.5)


def uncoalesced(seed: int) -> Tensor:
    values = torch.arange(3.0) + seed
    return torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [2, 2, 0]]), values, (4, 6))


def per_channel(seed: int) -> Tensor:
    scales = torch.arange(1, 5) * 0.1 + seed
    return torch.quantize_per_channel(dense(seed), scales, torch.arange(4) + seed, 0, torch.qint8)


def jagged(seed: int) -> Tensor:
    rows = [torch.full((n, 3), float(seed + n)) for n in (2, 1 + seed % 3, 4)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def jagged_with_holes(seed: int) -> Tensor:
    values, offsets = torch.arange(20.0).reshape(10, 2) + seed, torch.tensor([0, 4, 10])
    return torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor([2, 3]))


def nested(seed: int) -> Tensor:
    return torch.nested.nested_tensor([torch.full((2, seed), 1.5), torch.ones(3, 1)])


ODD: dict[str, Callable[[int], Tensor]] = {
    "COO": lambda seed: dense(seed).to_sparse(),
    "COO uncoalesced": uncoalesced,
    "COO empty": lambda seed: torch.sparse_coo_tensor(size=(3, 2)),
    "CSR": lambda seed: dense(seed).to_sparse_csr(),
    "CSC": lambda seed: dense(seed).to_sparse_csc(),
    "BSR": lambda seed: dense(seed).to_sparse_bsr((2, 3)),
    "BSC": lambda seed: dense(seed).to_sparse_bsc((2, 3)),
    "quint8": lambda seed: torch.quantize_per_tensor(dense(seed), 0.1 * seed, 3, torch.quint8),
    "qint8": lambda seed: torch.quantize_per_tensor(dense(seed), 0.1 * seed, 0, torch.qint8),
    "quantised transposed": lambda seed: torch.quantize_per_tensor(
        dense(seed), 0.1 * seed, 0, torch.qint8
    ).t(),
    "per channel": per_channel,
    "nested": nested,
    "jagged": jagged,
    "jagged with holes": jagged_with_holes,
}
odd_tensors = pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())


@odd_tensors
def test_an_odd_tensor_in_a_dict_comes_back_whether_one_is_there_or_not(
    make: Callable[[int], Tensor],
) -> None:
    original = {"odd": make(1), "in": [make(2), {"deep": (make(3),)}]}
    fresh: dict[str, Any] = {}
    used = {"odd": make(1), "in": [make(1), {"deep": (make(2),)}]}
    there = used["odd"]

    with torch.device("meta"):  # a default device does not matter
        for live in (fresh, used):
            restore(CFCheckpoint(d=live), take(CFCheckpoint(d=original)))

    assert odd_bits(fresh) == odd_bits(used) == odd_bits(original)
    assert used["odd"] is there


@odd_tensors
def test_an_odd_buffer_and_the_odd_state_of_an_optimizer_come_back(
    make: Callable[[int], Tensor],
) -> None:
    def objects(seed: int) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        model.register_buffer("odd", make(2 if "jagged" in make.__name__ else max(seed, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if seed:
            flat = {"flat": make(seed), "step": torch.tensor(float(seed))}
            optimizer.state[model.weight] = flat
        return {"model": model, "optimizer": optimizer}

    saved = objects(2)
    for seed in (0, 1):
        live = objects(seed)
        buffer = live["model"].odd
        restore(CFCheckpoint(**live), take(CFCheckpoint(**saved)))
        for name, one in live.items():
            assert odd_bits(one.state_dict()) == odd_bits(saved[name].state_dict())
        assert live["model"].odd is buffer


def test_what_is_written_to_disk_is_verified_loaded_and_of_version_3(tmp_path: Path) -> None:
    original = {name.replace(" ", "_"): make(2) for name, make in ODD.items()}
    history = [1, {"loss": [0.5]}, torch.ones(2)]
    with CFManager(
        tmp_path, CFCheckpoint(d=original, history=history), mode=CFMode.MANUAL, chk_freq=0
    ) as manager:
        manager.step()
        manager.save(wait=True)

    loaded = checkfreq.load(tmp_path)
    live: dict[str, Any] = {"d": {}, "history": []}
    checkfreq.load(tmp_path, into=live)

    assert odd_bits(loaded["d"]) == odd_bits(original)
    assert odd_bits(live["d"]) == odd_bits(original)
    assert bits(live["history"]) == bits(loaded["history"]) == bits(history)
    manifest = (tmp_path / "step-00000001" / MANIFEST_NAME).read_bytes()
    assert json.loads(manifest)["format_version"] == 3


def test_tensors_keep_their_memory_where_the_shapes_of_their_parts_are_the_same() -> None:
    live = {"coo": uncoalesced(5), "q": ODD["qint8"](3)}
    places = live["coo"]._values().data_ptr(), live["q"].untyped_storage().data_ptr()
    restore(
        CFCheckpoint(d=live), take(CFCheckpoint(d={"coo": uncoalesced(1), "q": ODD["qint8"](1)}))
    )
    assert places == (live["coo"]._values().data_ptr(), live["q"].untyped_storage().data_ptr())
    assert not live["coo"].is_coalesced()


@pytest.mark.parametrize(
    ("saved", "live", "words"),
    [
        ("COO", "CSR", "checkpoint has a sparse_coo tensor .*, live is a sparse_csr tensor"),
        ("quint8", "qint8", "live is torch.int8|part 'values': checkpoint has uint8"),
    ],
)
def test_a_buffer_of_a_different_kind_is_a_mismatch(saved: str, live: str, words: str) -> None:
    def model(tensor: Tensor) -> nn.Module:
        made = nn.Module()
        made.register_buffer("odd", tensor)
        return made

    one, other = model(ODD[saved](1)), model(ODD[live](1))
    before = odd_bits(other.state_dict())
    with pytest.raises(MismatchError, match=words):
        plan(CFCheckpoint(model=other), take(CFCheckpoint(model=one)))
    plain = model(torch.ones(2))
    with pytest.raises(MismatchError, match="live is float32"):
        plan(CFCheckpoint(model=plain), take(CFCheckpoint(model=one)))
    with pytest.raises(MismatchError, match="checkpoint has a float32 tensor, live is a"):
        plan(CFCheckpoint(model=other), take(CFCheckpoint(model=plain)))
    assert odd_bits(other.state_dict()) == before


class TestForgedRecords:
    """Nothing in a manifest makes a tensor that reaches beyond its memory."""

    @pytest.mark.parametrize(
        ("name", "part"),
        [
            *(("COO", "indices"), ("CSR", "crow_indices"), ("CSR", "col_indices")),
            *(("BSC", "ccol_indices"), ("nested", "sizes"), ("nested", "strides")),
            *(("nested", "offsets"), ("jagged", "offsets"), ("jagged with holes", "lengths")),
        ],
    )
    @pytest.mark.parametrize("fill", [-1, 1 << 40])
    def test_indices_that_lead_out_of_the_memory_are_corruption(
        self, name: str, part: str, fill: int
    ) -> None:
        original = ODD[name](2)
        live = {"x": ODD[name](2), "y": torch.zeros(1)}
        shot = take(CFCheckpoint(d={"x": original, "y": torch.ones(1)}))
        views = dict(
            zip(
                (ref.key for ref in shot.captured.tensors),
                shot.layout.views(shot.slot),
                strict=True,
            )
        )
        views[f"x:{part}"].fill_(fill)
        before = odd_bits(live)
        with pytest.raises(CorruptCheckpointError):
            restore(CFCheckpoint(d=live), shot)
        assert odd_bits(live) == before


DTYPES = [
    value
    for value in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    if re.match(r"torch\.(float|bfloat|complex|u?int(8|16|32|64)|bool)", str(value))
]


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_every_dtype_with_whole_bytes_comes_back_in_place(dtype: torch.dtype) -> None:
    def made(seed: int) -> Tensor:
        raw = (torch.arange(6 * dtype.itemsize, dtype=torch.int64) * seed + seed) % 256
        raw = raw % 2 if dtype is torch.bool else raw
        return raw.to(torch.uint8).view(dtype)

    original, live = {"x": made(7), "y": made(5).clone()}, {"x": made(3)}
    there = live["x"]
    restore(CFCheckpoint(d=live), take(CFCheckpoint(d=original)))
    assert live["x"] is there
    assert bits(live) == bits(original)


def test_conjugate_and_negative_views_come_back_in_place_as_the_values_that_they_show() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    original = {"conj": base.conj(), "neg": base.clone().conj().imag}
    assert original["neg"].is_neg()
    other = torch.zeros(2, dtype=torch.complex64)
    live = {"conj": other.conj(), "neg": torch.zeros(2, dtype=torch.complex64).conj().imag}
    restore(CFCheckpoint(d=live), take(CFCheckpoint(d=original)))
    assert torch.equal(live["conj"], original["conj"])
    assert torch.equal(live["neg"], original["neg"])
    assert torch.equal(other, base)
    assert live["neg"].is_neg()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(2, 2).to_mkldnn(), r"layout torch\._mkldnn .* keep to_dense\(\)"),
        (lambda: torch.empty(2, dtype=torch.bits8), r"dtype torch\.bits8 cannot be kept"),
        (
            lambda: torch.quantize_per_channel(
                torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2
            ),
            r"torch\.quint4x2 cannot be kept, since several of its elements share a byte",
        ),
    ],
    ids=["mkldnn", "bits8", "quint4x2"],
)
def test_what_cannot_be_kept_exactly_is_refused_with_the_reason(
    make: Callable[[], Tensor], words: str
) -> None:
    with pytest.raises(StateError, match=rf"^d\.odd\.x: .*{words}"):
        take(CFCheckpoint(d={"odd": {"x": make()}}))


class TestLists:
    """A list as a tracked object."""

    def test_it_stays_the_same_object_and_so_do_lists_dicts_and_tensors_in_it(self) -> None:
        original = [1, [2.5, (3, [4])], {"loss": [0.5, 0.25]}, torch.ones(3), "text"]
        live: list[Any] = [0, [0.0, (0, [0, 0])], {"loss": []}, torch.zeros(3)]
        inner, losses, tensor = live[1], live[2]["loss"], live[3]
        restore(CFCheckpoint(history=live), take(CFCheckpoint(history=original)))
        assert bits(live) == bits(original)

        now = live[1], live[2]["loss"], live[3]
        assert all(a is b for a, b in zip(now, (inner, losses, tensor), strict=True))


class TestNestedContainers:
    """Whoever holds on to what is inside sees the restored values."""

    def test_a_container_that_is_there_twice_takes_one_content(self) -> None:
        shared: dict[str, int] = {}
        live = {"a": shared, "b": shared}
        restore(CFCheckpoint(d=live), take(CFCheckpoint(d={"a": {"x": 1}, "b": {"x": 2}})))
        assert live == {"a": {"x": 1}, "b": {"x": 2}}

    def test_containers_of_other_types_are_made_anew(self) -> None:
        original = {"a": OrderedDict(x=torch.ones(1)), "b": defaultdict(list, x=[1]), "c": [1]}
        live = {"a": {"x": torch.zeros(1)}, "b": defaultdict(int, x=1), "c": (1,)}
        restore(CFCheckpoint(d=live), take(CFCheckpoint(d=original)))
        assert bits(live) == bits(original)
        assert [type(one) for one in live.values()] == [OrderedDict, defaultdict, list]
        assert live["b"].default_factory is list  # type: ignore[union-attr]
