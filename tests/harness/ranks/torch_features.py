"""Features of torch that use a process group, with the backend `builtin`, compared with one process in float64."""

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

EXACT_TOLERANCE = 1e-12
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


def compare_parameters(model: nn.Module, expected: nn.Module, tolerance: float = EXACT_TOLERANCE) -> None:
    for parameter, expected_parameter in zip(model.parameters(), expected.parameters(), strict=True):
        full_parameter = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        difference = (full_parameter - expected_parameter).abs().max()
        assert difference <= tolerance, difference


def train_reference(x: Tensor) -> nn.Module:
    model = make_model()
    initial_weight = next(model.parameters()).clone()
    train(model, x)
    change = next(model.parameters()) - initial_weight
    assert change.abs().max() > 1e-3, "the parameters must change, or the comparison proves nothing"
    return model


def train_with_ddp(world: World) -> None:
    """Train with DDP and its hooks, which use futures. Those of PowerSGD wait for each other."""
    x = make_batch(world.size)
    expected = train_reference(x)
    shard = x.chunk(world.size)[world.rank]
    tolerances = {"default": EXACT_TOLERANCE, "small buckets": EXACT_TOLERANCE, "bf16": 1e-3, "powersgd": 0.1}
    for kind, tolerance in tolerances.items():
        torch.manual_seed(0)
        bucket_mb = 1e-3 if kind == "small buckets" else 25
        model = DistributedDataParallel(make_model(), bucket_cap_mb=bucket_mb)
        if kind == "bf16":
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        if kind == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        train(model, shard)
        compare_parameters(model, expected, tolerance)


def train_with_fsdp(world: World) -> None:
    """Train with FSDP2, which gathers into slices of an output and averages in its reduce-scatter."""
    x = make_batch(world.size)
    model = make_model()
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    train(model, x.chunk(world.size)[world.rank])
    compare_parameters(model, train_reference(x))


def train_with_tensor_parallelism(world: World) -> None:
    """Train with column-wise and row-wise shards of two layers. Every rank gets the full batch."""
    x = make_batch(world.size)
    mesh = init_device_mesh("cpu", (world.size,))
    model = parallelize_module(make_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, x)
    compare_parameters(model, train_reference(x))


def use_device_meshes(world: World) -> None:
    """Reduce over one dimension of a mesh, and redistribute a tensor."""
    rows = 2 if world.size % 2 == 0 else 1
    columns = world.size // rows
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("a", "b"))
    value = torch.tensor([1.0])
    dist.all_reduce(value, group=mesh.get_group("b"))
    assert value.item() == columns
    matrix = torch.arange(float(world.size * world.size)).view(world.size, world.size)
    flat_mesh = init_device_mesh("cpu", (world.size,))
    by_rows = distribute_tensor(matrix, flat_mesh, [Shard(0)])
    by_columns = by_rows.redistribute(flat_mesh, [Shard(1)])
    assert torch.equal(by_columns.to_local(), matrix[:, world.rank : world.rank + 1])
    assert torch.equal(by_rows.full_tensor(), matrix)


def call_functional_collectives(world: World) -> None:
    """Call the functional collectives, which torch.compile and DTensor use."""
    rank = world.rank
    size = world.size
    group = dist.group.WORLD
    assert group is not None
    value = torch.full((size, 2), float(rank))
    total = float(sum(range(size)))
    all_ranks = torch.arange(float(size))

    assert funcol.all_reduce(value, "sum", group).eq(total).all()
    assert value.eq(rank).all()
    assert funcol.all_reduce(value, "avg", group).eq(total / size).all()
    assert torch.equal(funcol.all_gather_single(value[:1], 0, group)[:, 0], all_ranks)
    assert funcol.reduce_scatter_single(value, "sum", 0, group).eq(total).all()
    exchanged = funcol.all_to_all_single(value, None, None, group)
    assert torch.equal(exchanged[:, 0], all_ranks)
    assert funcol.broadcast(value, size - 1, group).eq(size - 1).all()


def call_coalesced_collectives(world: World) -> None:
    """Call the functional collectives that communicate several tensors at once."""
    size = world.size
    group = dist.group.WORLD
    assert group is not None
    value = torch.full((size, 2), float(world.rank))
    total = float(sum(range(size)))

    reduced = funcol.all_reduce_coalesced([value, value[:1]], "sum", group)
    assert all(tensor.eq(total).all() for tensor in reduced)
    assert reduced[1].shape == (1, 2)
    gathered = funcol.all_gather_single_coalesced([value[:1], value[:, :1].contiguous()], group)
    assert torch.equal(gathered[0][:, 0], torch.arange(float(size)))
    assert gathered[1].shape == (size * size, 1)
    scattered = funcol.reduce_scatter_single_coalesced([value, value], "sum", [0, 0], group)
    assert all(tensor.eq(total).all() for tensor in scattered)


CASES = {
    "ddp": train_with_ddp,
    "fsdp": train_with_fsdp,
    "tensor_parallelism": train_with_tensor_parallelism,
    "meshes": use_device_meshes,
    "functional_collectives": call_functional_collectives,
    "coalesced_collectives": call_coalesced_collectives,
}
