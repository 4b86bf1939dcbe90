"""Data parallelism: all ranks train the same model on shards of each batch and average gradients.

    python experiments/ddp_multinode.py                                        two ranks on this machine
    python experiments/ddp_multinode.py processes_per_node=4 compare=true      four ranks, compared with one process
    python experiments/ddp_multinode.py strategy=fsdp clip=1                   parameters sharded over the ranks
    python experiments/ddp_multinode.py zero1=true optim.name=adam             only the optimizer state is sharded
    python experiments/ddp_multinode.py model=resnet18 data.name=cifar10 sync_batchnorm=true
    python experiments/ddp_multinode.py model=resnet18 data.name=generated communication=bf16 steps=50
    python experiments/ddp_multinode.py model=resnet50 weights=FILE            start from trained weights
    torchrun --nproc-per-node=2 experiments/ddp_multinode.py                   started by another launcher
    make exp NAME=ddp_multinode NODES=2                                        on a cluster

A run takes less than a minute on 2 CPU cores. Expect a test accuracy of 98 % on MNIST after one epoch. If MNIST is not
available, the built-in digits are used instead.

`batch` is the global batch size N. A batch is divided into p shards, and rank r processes shard r. Shards are equal by
default; ranks of unequal speed can have unequal shards, such as `shards=[3,1]`. The loss of a rank is the sum over the
samples of its shard divided by N / p. The mean of the ranks' gradients is therefore the gradient of the mean loss over
the whole batch, so every rank takes the same step as a single process would. DistributedDataParallel all-reduces
gradients bucket by bucket while backward is still running (Li et al. 2020, arXiv 2006.15704), optionally in half
precision or compressed by PowerSGD (Vogels et al. 2019, arXiv 1905.13727). fully_shard keeps 1/p of each parameter on a
rank, all-gathers each layer before it is used, and reduce-scatters the layer's gradients (Zhao et al. 2023, arXiv
2304.11277). With `fsdp=2` and more ranks, there are several replicas of two shards each. With DDP, `zero1=true` divides
only the optimizer state (Rajbhandari et al. 2019, arXiv 1910.02054). BatchNorm uses the statistics of each rank's shard
unless they are synchronized (`sync_batchnorm`). With `optim.base_batch`, the learning rate is proportional to the batch
size (linear scaling rule, Goyal et al. 2017, arXiv 1706.02677).
"""

from __future__ import annotations

from common.api import ReportData, Run, build_optimizer, init_network, start
from common.techniques.data_parallel import ddp, sync_batchnorm
from common.techniques.data_parallel.shards import set_up_shards
from common.techniques.data_parallel.single_process_baseline import report_scaling
from common.techniques.data_parallel.state_report import report_state_bytes
from configs.ddp_multinode import Config

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer


def list_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model. A list or dict of layers has no forward pass, so its elements are yielded."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from list_layers(child)
        else:
            yield child


def list_fsdp_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP shards separately: the layers, and last the model with all other parameters.

    Layers that share a parameter with another layer are part of the unit of the model.
    """
    layers = list(dict.fromkeys(list_layers(model)))  # a layer may be an attribute and also an element of a list
    owners = Counter(parameter for layer in layers for parameter in layer.parameters())
    owners.update(model.parameters(recurse=False))
    return [layer for layer in layers if all(owners[parameter] == 1 for parameter in layer.parameters())] + [model]


def shard_model(cfg: Config, model: nn.Module, run: Run) -> None:
    """Shard the model across all ranks, or across `fsdp` neighboring ranks, and replicate it on the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # imported here because the import takes two seconds

    shards = cfg.fsdp or run.world.size
    replicas = run.world.size // shards
    mesh = init_device_mesh(run.device.type, (replicas, shards), mesh_dim_names=("replicas", "fsdp"))
    if replicas == 1:
        mesh = mesh["fsdp"]
    *layers, whole_model = list_fsdp_units(model)
    for layer in layers:  # a layer is all-gathered just before its forward pass
        fully_shard(layer, mesh=mesh, reshard_after_forward=cfg.reshard)
    fully_shard(whole_model, mesh=mesh)


def wrap_model(cfg: Config, model: nn.Module, run: Run) -> nn.Module:
    """Replicate the model on every rank (DDP), or shard parameters, gradients and optimizer state (FSDP2)."""
    if cfg.memory.recompute != "none":
        from common.techniques.recompute import recompute_blocks  # imported here because few runs recompute

        recompute_blocks(model, cfg.memory.recompute)  # residual blocks discard activations until backward needs them
    if cfg.sync_batchnorm:
        model = sync_batchnorm.convert_sync_batchnorm(model, run.device)
    set_up_shards(cfg.sharding, run, model)  # with shards=auto, the speed of each rank is measured before step 1
    if cfg.strategy == "fsdp":
        shard_model(cfg, model, run)
        return model
    replica = ddp.replicate(
        model,
        run,
        bucket_cap_mb=ddp.choose_bucket_mb(cfg.communication, cfg.bucket_mb, run.world.backend),
        gradient_as_bucket_view=cfg.gradient_as_bucket_view,
        static_graph=cfg.static_graph,
        find_unused_parameters=cfg.find_unused_parameters,
    )
    ddp.register_comm_hook(replica, cfg.communication, cfg.powersgd_rank)
    if cfg.state_sharding.zero1:
        from common.techniques.sharded_optimizer import divide_optimizer_state  # imported here because few runs use it

        divide_optimizer_state(run)  # each rank updates some parameters, and sends them to the other ranks
    return replica


def report_memory(cfg: Config, run: Run, network: nn.Module, optimizer: Optimizer) -> list[ReportData]:
    """Report the size of the training state and, with `log.memory`, the values of formulas for memory and messages."""
    reports = [report_state_bytes(optimizer, run.world)]
    if cfg.log.memory:
        from common.techniques.data_parallel.step_formulas import report_step_formulas  # few runs measure memory

        reports.append(report_step_formulas(cfg, run, list_fsdp_units(network)))
    return reports


def main(cfg: Config, run: Run) -> None:
    network = init_network(cfg, run.sample_shape, run.outputs)  # the weights are the same on every rank
    model = wrap_model(cfg, network.to(run.device, run.dtype), run)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    batches = run.batches(shard=run.shard)  # rank r reads shard r of every batch
    run.register(network, optimizer, batches, replicated=True)

    for step in run.steps():
        with step:
            optimizer.zero_grad()
            loss = run.loss(model(step.x), step.y, reduction="sum") / step.mean_shard
            step.log(loss=loss)
            loss.backward()  # also averages gradients over the ranks; with FSDP, each rank keeps one shard
            step.clip_gradients(model.parameters(), cfg.regularization.clip)
            step.commit()  # with elastic=true, either all remaining ranks apply the update or none of them does
            optimizer.step()
    run.report(*report_scaling(cfg, run, model), *report_memory(cfg, run, network, optimizer))


if __name__ == "__main__":
    start(main, Config)
