"""Mistakes with data parallelism on two ranks with short timeouts."""

from __future__ import annotations

import copy
import datetime
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.models.networks import SimpleNN
from common.ranks.rendezvous import World
from common.techniques.data_parallel import ddp, sync_batchnorm
from configs.ddp_multinode import Config
from experiments import ddp_multinode
from tests.harness.pitfalls.outcomes import TIMEOUT_SECONDS, collect_from_ranks, record_outcome


def make_run_stub(world: World) -> Any:
    """Return an object with the attributes of a run that the experiment's `wrap_model` uses."""

    def ignore(*_: Any) -> None:
        """No run trains the model."""

    return SimpleNamespace(world=world, device=world.device, add_hook=ignore, add_local_part=ignore)


def ranks_in_a_loop() -> Any:
    """The mistake: `for rank in range(2): train(rank)`."""
    store_file = str(Path(tempfile.mkdtemp()) / "store")
    started_ranks = []

    def train(rank: int) -> None:
        started_ranks.append(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = datetime.timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", store=dist.FileStore(store_file, 2), rank=rank, world_size=2, timeout=limit)

    def loop() -> None:
        for rank in range(2):
            train(rank)

    size_on_ranks = collect_from_ranks(2, lambda world: world.size)
    return {"loop": record_outcome(loop), "started_ranks": started_ranks, "size_on_ranks": size_on_ranks}


def group_used_after_workers_exit() -> Any:
    """The mistake: worker processes initialize the group and exit; then the parent process uses it."""
    return {
        "in_workers": collect_from_ranks(2, lambda world: dist.is_initialized()),
        "in_parent": dist.is_initialized(),
        "all_reduce": record_outcome(lambda: dist.all_reduce(torch.ones(1))),
    }


def barrier_on_one_rank() -> Any:
    """The mistake: only rank 0 calls `dist.barrier`."""

    def sum_after_barrier(world: World, on_all_ranks: bool) -> float:
        if on_all_ranks or world.is_main:
            dist.barrier()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    return {
        "one rank": collect_from_ranks(2, lambda world: sum_after_barrier(world, on_all_ranks=False)),
        "all ranks": collect_from_ranks(2, lambda world: sum_after_barrier(world, on_all_ranks=True)),
    }


def several_device_ids() -> Any:
    """The mistake: `device_ids` with two devices. The correct wrapper follows."""

    def wrap(world: World) -> Any:
        outcome = record_outcome(lambda: DistributedDataParallel(SimpleNN(), device_ids=[0, 1]))
        model = ddp_multinode.wrap_model(Config(), SimpleNN(), make_run_stub(world))
        return {"outcome": outcome, "correct_class": type(model).__name__}

    return collect_from_ranks(2, wrap)


def count_parameters_per_rank() -> Any:
    """Return the number of parameters that each rank holds with ddp and with fsdp."""

    def count_local_parameters(world: World, strategy: Any) -> int:
        model = ddp_multinode.wrap_model(Config(strategy=strategy), SimpleNN(), make_run_stub(world))
        count = 0
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            count += local.numel()
        return count

    def count_by_strategy(world: World) -> dict[str, int]:
        return {strategy: count_local_parameters(world, strategy) for strategy in ("ddp", "fsdp")}

    return collect_from_ranks(2, count_by_strategy)


def describe_shards() -> Any:
    """Return, for 4 ranks with hybrid sharding, the number of values that a rank holds before and after a forward pass.

    The first number is that of the parameters of a layer between two steps. The second one contains the gathered
    parameters, which the layer keeps with reshard=false.
    """

    def count_values(world: World, reshard: bool) -> list[int]:
        cfg = Config(strategy="fsdp", fsdp=2, reshard=reshard)
        model: Any = ddp_multinode.wrap_model(cfg, SimpleNN(), make_run_stub(world))
        counts = []
        for forward_passes in range(2):
            for _ in range(forward_passes):
                model(torch.ones(1, 1, 28, 28))
            weight = next(model.children()).weight
            counts.append(weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel())
        return counts

    return collect_from_ranks(4, lambda world: [count_values(world, reshard) for reshard in (True, False)])


def compare_batchnorm_statistics() -> Any:
    """Return whether BatchNorm under DDP has the statistics of the samples of the rank, as without DDP."""

    def has_equal_buffers(world: World) -> bool:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        unwrapped = copy.deepcopy(inner)
        model = ddp.wrap_ddp(inner, world.device)
        for step in range(3):
            torch.manual_seed(10 * step + world.rank)
            x = torch.randn(5, 3, 4, 4)
            model(x).sum().backward()
            unwrapped(x)
        return all(torch.equal(a, b) for a, b in zip(inner.buffers(), unwrapped.buffers(), strict=True))

    return collect_from_ranks(2, has_equal_buffers)


def call_torch_sync_batchnorm() -> Any:
    """Return the result of torch's SyncBatchNorm on each rank."""
    return collect_from_ranks(2, lambda world: nn.SyncBatchNorm(3)(torch.randn(2, 3, 4, 4)).sum().item())


def compare_sync_batchnorm() -> Any:
    """Return the largest difference of synchronized BatchNorm in float32 from one process in float64, for each layer.

    The mean of the inputs is large compared with their deviations. The first rank has one sample of five.
    """

    def compare(world: World, layer: nn.Module, *sizes: int) -> float:
        torch.manual_seed(0)
        x = torch.randn(5, 3, *sizes) + 1e3
        factors = torch.randn(x.shape)  # makes the gradients of the samples differ
        samples = slice(0, 1) if world.is_main else slice(1, 5)
        synced: Any = sync_batchnorm.convert_sync_batchnorm(copy.deepcopy(layer), world.device)
        shard = x[samples].requires_grad_()
        output = synced(shard)
        (output * factors[samples]).sum().backward()
        dist.all_reduce(synced.weight.grad)

        reference: Any = layer.double()
        whole = x.double().requires_grad_()
        expected_output = reference(whole)
        (expected_output * factors).sum().backward()
        assert whole.grad is not None
        pairs = [
            (output, expected_output[samples]),
            (shard.grad, whole.grad[samples]),
            (synced.weight.grad, reference.weight.grad),
            (synced.running_mean, reference.running_mean),
            (synced.running_var, reference.running_var),
        ]
        return max(((actual - expected).abs() / (1 + expected.abs())).max().item() for actual, expected in pairs)

    def compare_layers(world: World) -> list[float]:
        return [
            compare(world, nn.BatchNorm1d(3)),
            compare(world, nn.BatchNorm1d(3), 4),
            compare(world, nn.BatchNorm2d(3), 4, 2),
            compare(world, nn.BatchNorm3d(3), 4, 2, 2),
        ]

    return collect_from_ranks(2, compare_layers)


def normalize_one_sample() -> Any:
    """Return the result of synchronized BatchNorm of a batch with one sample, which the first rank has."""

    def normalize(world: World) -> float:
        layer = sync_batchnorm.convert_sync_batchnorm(nn.BatchNorm1d(3), world.device)
        output = layer(torch.ones(1 if world.is_main else 0, 3))
        return float(output.sum())

    return collect_from_ranks(2, normalize)
