"""What torch builds on a process group, on the backend `builtin`, in float64 beside one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from common.ranks.rendezvous import World

EXACT = 1e-12
STEPS = 3


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 120), nn.Tanh(), nn.Linear(120, 12)).double()


def make_batch(size: int) -> Tensor:
    return torch.randn(4 * size, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def compare(model: nn.Module, expected: nn.Module, tolerance: float = EXACT) -> None:
    for found, right in zip(model.parameters(), expected.parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert (whole - right).abs().max() <= tolerance, (whole - right).abs().max()


def train_alone(x: Tensor) -> nn.Module:
    model = make_model()
    before = next(model.parameters()).clone()
    train(model, x)
    assert (next(model.parameters()) - before).abs().max() > 1e-3, "a model that learns nothing proves nothing"
    return model


def ddp(world: World) -> None:
    """DDP and its hooks, which work by futures; PowerSGD's wait for each other."""
    x = make_batch(world.size)
    expected = train_alone(x)
    shard = x.chunk(world.size)[world.rank]
    kinds = {"plain": EXACT, "small buckets": EXACT, "bf16": 1e-3, "powersgd": 0.1}
    for kind, tolerance in kinds.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(make_model(), bucket_cap_mb=1e-3 if kind == "small buckets" else 25)
        if kind == "bf16":
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        if kind == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(model, shard)
        compare(model, expected, tolerance)


def fsdp(world: World) -> None:
    """FSDP2, whose all-gathers take slices of their outputs, and whose reduce-scatter means."""
    x = make_batch(world.size)
    model = make_model()
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    train(model, x.chunk(world.size)[world.rank])
    compare(model, train_alone(x))


def tensor_parallelism(world: World) -> None:
    """Column and row wise shards of two layers; every rank sees the whole batch."""
    x = make_batch(world.size)
    mesh = init_device_mesh("cpu", (world.size,))
    model = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, x)
    compare(model, train_alone(x))


def meshes(world: World) -> None:
    """Two dimensions of a mesh, and a tensor that is laid out anew between them."""
    first = 2 if world.size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (first, world.size // first), mesh_dim_names=("a", "b"))
    value = torch.tensor([1.0])
    dist.all_reduce(value, group=mesh.get_group("b"))
    assert value.item() == world.size // first
    whole = torch.arange(float(world.size * world.size)).view(world.size, world.size)
    row = init_device_mesh("cpu", (world.size,))
    placed = distribute_tensor(whole, row, [Shard(0)])
    assert torch.equal(placed.redistribute(row, [Shard(1)]).to_local(), whole[:, world.rank : world.rank + 1])
    assert torch.equal(placed.full_tensor(), whole)


def functional(world: World) -> None:
    """Functional collectives, by which torch.compile and DTensor communicate."""
    rank, size = world.rank, world.size
    group, value = dist.group.WORLD, torch.full((size, 2), float(rank))
    assert group is not None
    total = float(sum(range(size)))
    assert funcol.all_reduce(value, "sum", group).eq(total).all() and value.eq(rank).all()
    assert funcol.all_reduce(value, "avg", group).eq(total / size).all()
    assert torch.equal(funcol.all_gather_single(value[:1], 0, group)[:, 0], torch.arange(float(size)))
    assert funcol.reduce_scatter_single(value, "sum", 0, group).eq(total).all()
    found = funcol.all_to_all_single(value, None, None, group)
    assert torch.equal(found[:, 0], torch.arange(float(size)))
    two = funcol.all_reduce_coalesced([value, value[:1]], "sum", group)
    assert all(one.eq(total).all() for one in two) and two[1].shape == (1, 2)
    gathered = funcol.all_gather_single_coalesced([value[:1], value[:, :1].contiguous()], group)
    assert torch.equal(gathered[0][:, 0], torch.arange(float(size))) and gathered[1].shape == (size * size, 1)
    scattered = funcol.reduce_scatter_single_coalesced([value, value], "sum", [0, 0], group)
    assert all(one.eq(total).all() for one in scattered)
    assert funcol.broadcast(value, size - 1, group).eq(size - 1).all()


CASES = (ddp, fsdp, tensor_parallelism, meshes, functional)
