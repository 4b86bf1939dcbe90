"""Data parallelism: every rank trains the same model on its shard of each batch, and gradients are averaged.

    python experiments/ddp_multinode.py                                        two ranks on this machine
    python experiments/ddp_multinode.py processes_per_node=4 compare=true      four ranks, and the speedup over one
    python experiments/ddp_multinode.py strategy=fsdp clip=1                   parameters sharded over the ranks
    python experiments/ddp_multinode.py model=resnet18 data.name=cifar10 sync_batchnorm=true
    python experiments/ddp_multinode.py model=resnet18 data.name=generated communication=bf16 steps=50
    python experiments/ddp_multinode.py model=resnet50 weights=FILE            start from trained weights
    torchrun --nproc-per-node=2 experiments/ddp_multinode.py                   started by another launcher
    make exp NAME=ddp_multinode NODES=2                                        on a cluster

Takes about a minute on 2 CPU cores. Expect 98 % test accuracy on MNIST after one epoch (without MNIST: on the
built-in digits).

`batch` is the global batch of N samples. It is divided into p shards, equal ones or, for ranks of unequal speed,
`shards=[3,1]`; rank r takes shard r. Its loss is the sum over its samples divided by N / p. The mean of the ranks'
gradients is then the gradient of the mean loss over the whole batch, so every rank takes the same step as a single
process would. DistributedDataParallel all-reduces gradients bucket by bucket while backward is still running (Li et al.
2020, arXiv 2006.15704), optionally in half precision or compressed by PowerSGD (Vogels et al. 2019, arXiv 1905.13727).
fully_shard keeps 1/p of each parameter, all-gathers a layer before use and reduce-scatters its gradient (Zhao et al.
2023, arXiv 2304.11277). BatchNorm uses the statistics of the rank's shard unless it is synchronised. With
`optim.base_batch` the learning rate grows with the batch: the linear scaling rule (Goyal et al. 2017, arXiv
1706.02677).
"""

from __future__ import annotations

from common.api import Run, TrainState, build_optimizer, ddp, init_network, score_replicated, start, sync_batchnorm
from common.training.single_process_baseline import report_scaling, set_up_shards
from configs.ddp_multinode import Config

import torch.nn.functional as F
from torch import nn


def wrap_model(cfg: Config, model: nn.Module, run: Run) -> nn.Module:
    """Replicate the model on every rank (DDP), or shard parameters, gradients and optimizer state (FSDP2)."""
    if cfg.sync_batchnorm:
        model = sync_batchnorm.convert_sync_batchnorm(model, run.device)
    if cfg.strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # imported only if needed: takes two seconds

        mesh = init_device_mesh(run.device.type, (run.world.size,))
        for unit in (*model.children(), model):
            fully_shard(unit, mesh=mesh)  # a unit is all-gathered just before its forward
        return model
    replica = ddp.wrap_ddp(
        model,
        run.device,
        bucket_cap_mb=ddp.choose_bucket_mb(cfg.communication, cfg.bucket_mb, run.world.backend),
        gradient_as_bucket_view=cfg.gradient_as_bucket_view,
        static_graph=cfg.static_graph,
        find_unused_parameters=cfg.find_unused_parameters,
    )
    ddp.register_comm_hook(replica, cfg.communication, cfg.powersgd_rank)
    return replica


def main(cfg: Config, run: Run) -> None:
    network = init_network(cfg, run.sample_shape, run.classes)  # same weights on every rank
    model = wrap_model(cfg, network.to(run.device, run.dtype), run)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    batches = run.batches(shard=run.shard)  # rank r reads shard r of every batch
    set_up_shards(cfg, run, batches, network)  # with shards=auto: measures the speed of each rank
    ddp.warm_up_buckets(model, run.load_example(batches.local_samples))
    state = TrainState([network], optimizer, batches, run.world, replicated=True, replica=model)

    for step in run.steps(state, lambda: score_replicated(network, run)):
        with step:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(step.x), step.y, reduction="sum") / step.mean_shard
            step.log(loss=loss.detach())
            step.mark("backward")
            loss.backward()  # gradients are now averaged over the ranks (FSDP: this rank's shard of them)
            step.mark("end of backward")
            if cfg.clip:
                nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            step.commit()  # with elastic=true: the update counts on all remaining ranks or on none
            optimizer.step()
    run.report(*report_scaling(cfg, run, model))


if __name__ == "__main__":
    start(main, Config)
