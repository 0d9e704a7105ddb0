"""What the ranks of tests/state/test_ranks.py run: models, state of all kinds, comparisons."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from checkfreq.errors import StateError
from checkfreq.restore.needed_files import needed_files
from checkfreq.snapshot.digests import structure_digest, structure_listing
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import Role
from tests.state.ranks import Manifest, Part, part, restored
from tests.state.support import bits

#: A checkpoint, and a function that returns all bits that must come back: a collective.
Made: TypeAlias = tuple[CFCheckpoint, Callable[[], Any]]
#: Makes it from a role and a seed; 1: to be saved.
Make: TypeAlias = Callable[[Role, int], Made]


class Block(nn.Module):
    """A transformer's block without its attention; the odd width shards unevenly."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Language(nn.Module):
    """Tied embeddings, two blocks, a buffer and a scalar parameter."""

    def __init__(self, words: int = 13, width: int = 6, hidden: int = 9) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(2)])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next word."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def fsdp(model: Language, mesh: DeviceMesh | None = None) -> Language:
    """The model fully sharded, each block by itself."""
    options = {} if mesh is None else {"mesh": mesh}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


class Run:
    """A model and its optimizer, trained on the same global batches at any world."""

    def __init__(self, model: Language, role: Role, **options: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        self.chk = CFCheckpoint(model=model, optimizer=self.optimizer)
        self.role = role
        self.steps = 0

    def step(self, *, accumulate: int = 2) -> None:
        """One update of gradients accumulated over several batches."""
        for _ in range(accumulate):
            words = torch.arange(4 * self.role.world).view(self.role.world, 4) + self.steps
            mine = words[self.role.rank : self.role.rank + 1] % 13
            loss = nn.functional.cross_entropy(self.model(mine).flatten(0, 1), mine.flatten())
            loss.backward()
            self.steps += 1
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full(self) -> Any:
        """Bits of the whole state, the same on all ranks: a collective."""
        states = {
            n: {k: whole(v) for k, v in self.optimizer.state[p].items()}
            for n, p in self.model.named_parameters()
            if p in self.optimizer.state
        }
        model = {name: whole(value) for name, value in self.model.state_dict().items()}
        return bits({"model": model, "o": states})


def whole(value: Any) -> Any:
    """A DTensor put together by torch; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def each(role: Role, programs: Mapping[str, Callable[[Role], Any]]) -> dict[str, Any]:
    """What each of several programs returns, one after the other in the same processes."""
    return {name: program(role) for name, program in programs.items()}


def capture_made(role: Role, make: Make) -> tuple[Part, Any]:
    """A part of what is made, and the state that must come back."""
    chk, state = make(role, 1)
    return part(chk, role, positions={"train": {"at": role.rank}}), state()


def restore_made(role: Role, manifest: Manifest, make: Make) -> tuple[Any, Any, Any]:
    """The state before and after a restore from the files that it needs; the positions."""
    chk, state = make(role, 2)
    before = state()
    plan = restored(chk, manifest, role.rank, needed_files(chk, manifest, role))
    return before, state(), plan.positions


def trained_run(role: Role) -> Run:
    """A fully sharded model after two updates."""
    torch.manual_seed(1)
    run = Run(fsdp(Language()), role)
    run.step()
    run.step()
    return run


def capture_trained(role: Role) -> tuple[Part, Any]:
    """A part, and the whole state."""
    run = trained_run(role)
    return part(run.chk, role), run.full()


def capture_optimizer(role: Role) -> tuple[Part, Part, Any]:
    """Parts of an optimizer whose model is not tracked, and of one beside its model."""
    run = trained_run(role)
    return part(CFCheckpoint(optimizer=run.optimizer), role), part(run.chk, role), run.full()


def restore_optimizer(role: Role, manifest: Manifest) -> Any:
    """The whole state, of which the manifest has what the optimizer steps."""
    run = Run(fsdp(Language()), role)
    chk = CFCheckpoint(optimizer=run.optimizer)
    restored(chk, manifest, role.rank, needed_files(chk, manifest, role), world=role.world)
    return run.full()


def restore_after_a_look(role: Role, manifest: Manifest) -> tuple[Any, Any]:
    """A forward pass under no_grad leaves the root gathered: capture and restore see shards."""
    run = Run(fsdp(Language()), role)
    with torch.no_grad():
        run.model(torch.arange(4)[None])
    restored(run.chk, manifest, role.rank)
    then = run.full()
    with torch.no_grad():
        run.model(torch.arange(4)[None])
    return then, part(run.chk, role)


def meshes(role: Role) -> dict[str, DeviceMesh]:
    """All ranks in a row; for four also two by two, and its columns."""
    found = {"row": init_device_mesh("cpu", (role.world,), mesh_dim_names=("d",))}
    if role.world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found |= {"square": square, "tp": square["tp"]}
    return found


def tensors(role: Role, *, fill: bool, turned: bool = False) -> dict[str, Any]:
    """DTensors of every kind; ``turned``: sharded along another dimension."""
    mesh, dim = meshes(role), 1 if turned else 0
    row, square = mesh["row"], mesh.get("square", mesh["row"])
    sliced = mesh.get("tp", mesh["row"])
    two = square.ndim == 2

    def made(shape: tuple[int, ...], number: int, on: DeviceMesh, *placements: Any) -> DTensor:
        size = torch.Size(shape).numel()
        value = torch.arange(size, dtype=torch.float32).view(shape) + 1000 * number
        return distribute_tensor(value if fill else torch.zeros(shape), on, placements)

    tied = made((4, 4), 7, row, Shard(dim))
    return {
        "uneven": made((1001, 3), 1, row, Shard(dim)),
        "empty": made((2, 3), 2, row, Shard(dim)),
        "replicated": made((3, 3), 3, row, Replicate()),
        "hsdp": made((8, 5), 4, square, *((Replicate(), Shard(dim)) if two else (Shard(dim),))),
        "both": made((8, 6), 5, square, *((Shard(0), Shard(1)) if two else (Shard(dim),))),
        "same": made((7, 6), 6, square, *((Shard(0), Shard(0)) if two else (Shard(dim),))),
        "sliced": made((5, 6), 8, sliced, Shard(dim)),
        "tied": tied,
        "twin": tied,
        "scalar": made((), 9, row, Replicate()),
        "nothing": made((0, 3), 10, row, Shard(0)),
        "plain": torch.full((3,), 5.0 if fill else 0.0),
        "deep": {"list": [made((6, 6), 11, row, Shard(1)), 3]},
    }


class Holder:
    """An object known only by its two methods."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def wholes(value: Any) -> Any:
    """A tree with its DTensors put together."""
    if isinstance(value, dict):
        return {key: wholes(item) for key, item in value.items()}
    return [wholes(item) for item in value] if isinstance(value, list) else whole(value)


def capture_kinds(role: Role) -> tuple[Part, Any]:
    """A dict and an object that hold DTensors of every kind."""
    state, held = tensors(role, fill=True), Holder(tensors(role, fill=True))
    chk = CFCheckpoint(state=state, held=held)
    return part(chk, role), bits(wholes(state))


def restore_kinds(role: Role, manifest: Manifest, *, turned: bool) -> tuple[Any, Any, set[str]]:
    """The same, restored onto this world and sharding; the files that it took."""
    state = tensors(role, fill=False, turned=turned)
    held = Holder(tensors(role, fill=False, turned=turned))
    before = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    chk = CFCheckpoint(state=state, held=held)
    needed = needed_files(chk, manifest, role)
    restored(chk, manifest, role.rank, needed)
    assert all(state[name] is value for name, value in before.items() if name != "twin")
    for name, value in before.items():
        assert held.state[name].placements == value.placements
    return bits(wholes(state)), bits(wholes(held.state)), needed


def tensor_parallel(model: Language, mesh: DeviceMesh) -> Language:
    """Blocks split by columns, then by rows."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def capture_two_dimensions(role: Role, kind: str) -> tuple[Part, Any]:
    """Tensor parallel inside of fully sharded, or replicas of shards, on two by two ranks."""
    torch.manual_seed(3)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Language(hidden=8)
    if kind == "2d":
        model = fsdp(tensor_parallel(model, square["tp"]), square["dp"])
    elif kind == "hsdp":
        model = fsdp(model, square)
    else:
        model = tensor_parallel(model, square["tp"])
    run = Run(model, role, foreach=False)
    run.step()
    return part(run.chk, role), run.full()


def restore_tensor_parallel(role: Role, manifest: Manifest) -> Any:
    """Onto tensor parallelism on all ranks."""
    model = tensor_parallel(Language(hidden=8), init_device_mesh("cpu", (role.world,)))
    run = Run(model, role, foreach=False)
    restored(run.chk, manifest, role.rank)
    return run.full()


def digests(role: Role) -> tuple[list[str], dict[str, str]]:
    """Of equal structures, of one whose rank 1 has another shape, and own state that differs."""
    shape = (8, 3) if role.rank == 0 else (8, 4)
    mesh = init_device_mesh("cpu", (role.world,))
    shard = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    equal = CFCheckpoint(d={"x": torch.zeros(3), "s": shard})
    other = CFCheckpoint(d={"x": torch.zeros(shape), "s": shard})
    own = CFCheckpoint(d={"x": torch.zeros(3)}, m={"y": torch.zeros(shape)}, per_rank="m")
    found = [capture(c, role=role) for c in (equal, other, own)]
    dist.barrier()
    return [structure_digest(one) for one in found], structure_listing(found[1])


def others(role: Role, seed: int) -> Made:
    """Half precision with full-precision state, a scaler, an average, and a hook of the user's."""
    torch.manual_seed(seed)
    model = fsdp(Language()).to(torch.bfloat16)
    average = fsdp(Language())
    average.register_state_dict_pre_hook(lambda *_: None)
    average._register_load_state_dict_pre_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    hooked = torch.optim.SGD(average.parameters(), lr=0.1, momentum=0.9)
    hooked.register_state_dict_pre_hook(lambda _: None)
    hooked.register_load_state_dict_pre_hook(lambda *_: None)
    hooked.param_groups[0]["params"][0].grad = average.embed.weight.detach() + 1.0
    if seed == 1:
        hooked.step()
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = parameter.detach().float() / 3
    chk = CFCheckpoint(
        model=model, average=average, optimizer=optimizer, hooked=hooked, scaler=scaler
    )

    def state() -> Any:
        buffers = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
        models = {"model": model.state_dict(), "average": average.state_dict()}
        momenta = [hooked.state[p].get("momentum_buffer") for p in average.parameters()]
        assert isinstance(momenta[0], DTensor | None)
        both = {"buffers": buffers, "momenta": momenta, "scaler": scaler.state_dict()}
        return bits(wholes({**models, **both}))

    return chk, state


def refused(role: Role) -> list[str]:
    """What is said of what cannot be kept."""
    mesh = init_device_mesh("cpu", (role.world,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    split = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.optim import ZeroRedundancyOptimizer

        flat, original = (
            FullyShardedDataParallel(
                nn.Sequential(nn.Linear(6, 10)), device_id=torch.device("cpu"), use_orig_params=orig
            )
            for orig in (False, True)
        )
    zero = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    cases: list[tuple[dict[str, Any], Role]] = [
        ({"d": {"sum": partial}}, role),
        ({"per_rank": "m.embed", "m": fsdp(Language())}, role),
        ({"d": {"s": split}}, Role()),
        ({"m": flat}, role),
        ({"m": original.module[0]}, role),
        ({"o": torch.optim.SGD(flat.parameters(), lr=0.1)}, role),
        ({"o": zero}, role),
        ({"o": zero}, Role()),
    ]
    said = []
    for tracked, as_whom in cases:
        try:
            capture(CFCheckpoint(**tracked), role=as_whom)
        except StateError as error:
            said.append(str(error))
    return said


def capture_on_nodes(role: Role) -> tuple[Part, Any]:
    """Replicas of shards on two nodes with a directory each: every node writes its own."""
    torch.manual_seed(3)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    run = Run(fsdp(Language(), square), role)
    run.step()
    group = (0, 1) if role.rank < 2 else (2, 3)
    return part(run.chk, replace(role, group=group)), run.full()


class Rows(torch.optim.Optimizer):
    """Keeps a number per row of each parameter, as Adafactor's and its like do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Sums of squares only."""
        for parameter in self.param_groups[0]["params"]:
            sums = parameter.detach().square().sum(-1, keepdim=True)
            self.state[parameter] = {"row": sums, "step": torch.tensor(1.0)}


class Scaled(nn.Module):
    """A weight, a scalar, and extra state, all of them DTensors."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(distribute_tensor(torch.rand(5, 3), mesh, [Shard(0)]))
        self.scale = nn.Parameter(distribute_tensor(torch.rand(()), mesh, [Replicate()]))
        self.peak = distribute_tensor(torch.rand(8), mesh, [Shard(0)])

    def get_extra_state(self) -> Any:
        return {"peak": self.peak, "weight": self.weight.detach()}

    def set_extra_state(self, state: Any) -> None:
        self.peak = state["peak"]


def scaled(role: Role, seed: int) -> Made:
    """A part of whose state is there after one update alone."""
    mesh = init_device_mesh("cpu", (role.world,))
    model = nn.ModuleDict({"inner": Scaled(mesh, seed)})
    rows = Rows([p for p in model.parameters() if p.dim()])
    sgd = torch.optim.Adam([model["inner"].scale], foreach=False)
    model["inner"].scale.grad = torch.zeros_like(model["inner"].scale)
    if seed == 1:
        rows.step()
        sgd.step()
    chk = CFCheckpoint(rng=False, model=model, rows=rows, adam=sgd)

    def state() -> Any:
        found = {"rows": [*rows.state.values()], "adam": [*sgd.state.values()]}
        inner = model["inner"]
        for held in found.values():
            for values in held:
                types = {name: isinstance(value, DTensor) for name, value in values.items()}
                assert types == {name: name != "step" for name in types}
        assert isinstance(inner.peak, DTensor)
        return bits(wholes({"model": dict(model.named_parameters()), "peak": inner.peak, **found}))

    return chk, state


class Parted(nn.Module):
    """One layer sharded, one the same on all ranks, and a norm and a tied weight of each rank's."""

    def __init__(self, role: Role, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.sharded = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
        self.plain = nn.Linear(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.own = nn.Linear(4, 4, bias=False)
        self.twin = nn.Linear(4, 4, bias=False)
        self.twin.weight = self.own.weight
        fully_shard(self.sharded, mesh=init_device_mesh("cpu", (role.world,)))
        with torch.no_grad():
            for tensor in (*self.of_its_own(), self.sharded[1].running_mean):
                tensor.fill_(10 * seed + role.rank)

    def of_its_own(self) -> list[Tensor]:
        return [self.own.weight, self.norm.weight, self.norm.bias, self.norm.running_mean]


def parted(role: Role, seed: int) -> Made:
    """An optimizer of what is not each rank's own, stepped once; what is common, and the rest."""
    model = Parted(role, seed=seed)
    parameters = [*model.sharded.parameters(), *model.plain.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    chk = CFCheckpoint(per_rank=["model.norm", "model.twin"], model=model, optimizer=optimizer)

    def state() -> tuple[Any, list[float], float]:
        assert model.twin.weight is model.own.weight
        found = [whole(v) for one in optimizer.state.values() for v in one.values()]
        own = [float(tensor.detach().flatten()[0]) for tensor in model.of_its_own()]
        statistics = float(model.sharded[1].running_mean[0])  # every rank gathers its own
        return bits([*found, *map(whole, parameters)]), own, statistics

    return chk, state
