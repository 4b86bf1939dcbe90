"""Model parallelism: a ResNet partitioned into stages on different devices, one at a time or as a pipeline.

    python experiments/resnet_modelparallel.py                                   two stages, GPipe
    python experiments/resnet_modelparallel.py mode=naive                        one stage works, the other waits
    python experiments/resnet_modelparallel.py mode=single                       the unsplit model
    python experiments/resnet_modelparallel.py schedule=zero_bubble stages=3     another schedule, three ranks
    python experiments/resnet_modelparallel.py model=resnet50 data.image_size=64 split=[layer3_0]
    python experiments/resnet_modelparallel.py replicas=2                        two pipelines, each half of the batch
    python experiments/resnet_modelparallel.py devices=[cuda:0,cuda:1]           one process, two GPUs
    python experiments/resnet_modelparallel.py model=toy data.name=vectors loss=mse      10-10-5, random targets
    python experiments/resnet_modelparallel.py sweep=true                        all modes over sizes of microbatches

One run takes about half a minute on 2 CPU cores, the sweep six. Expect the pipelined mode between the naive one and
half of it; one process with both cores is a strong opponent.

A batch is split into microbatches of `split_size` samples. Naively a microbatch goes through all stages and back before
the next one starts, so one of p stages works at a time. As a pipeline (GPipe: Huang et al. 2019, arXiv 1811.06965;
interleaved 1F1B: Narayanan et al. 2021, arXiv 2104.04473; zero bubble: Qi et al. 2023, arXiv 2401.10241), stage 1 works
on microbatch 0 while stage 0 works on microbatch 1; with m microbatches of equal cost a stage idles
(p - 1) / (m + p - 1) of the time. Small microbatches leave less bubble, and each one works less efficiently.

With `replicas`, several such pipelines train on shards of the batch, and the replicas of a stage average its gradients:
across hosts only these travel, once a step. `memory_cap` shows why a model is split at all: what does not fit into one
rank fits into two.

BatchNorm takes its statistics over a microbatch, and its running statistics see one microbatch after the other: both
exactly as in the unsplit model that adds up the gradients of the same microbatches (mode=single with a split_size). So
split_size changes the training itself, in every mode.
"""

from __future__ import annotations

from common.api import (
    Facts,
    PipelineReport,
    Run,
    TrainState,
    build_optimizer,
    model_split,
    networks,
    score_test_set,
    start,
    sync_batchnorm,
)
from common.core.seeds import derive_seed
from common.distributed.mesh import create_mesh_groups
from common.distributed.rendezvous import World
from common.measure.memory import describe_peak_memory, format_megabytes, limit_memory, read_peak_memory
from common.models.model_file import load_initial_weights
from common.pipeline.executor import Loss
from common.pipeline.single_process import SingleProcessPipeline
from configs.resnet_modelparallel import Config

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def build_model(cfg: Config, run: Run) -> nn.Sequential:
    """Build the unsplit model, with the same weights on every rank: all draw from one seed."""
    toy, shape, classes = cfg.model == "toy", run.sample_shape, run.classes
    model = networks.Toy(shape, classes) if toy else networks.ResNet(cfg.model, shape, classes, width=cfg.width)
    load_initial_weights(model, cfg.weights, cfg.runs)
    return model.to(memory_format=torch.channels_last) if cfg.channels_last else model


def build_loss(cfg: Config, run: Run) -> Loss:
    """Build the loss, a mean over samples: cross-entropy, or the squared difference from a random vector per class."""
    if cfg.loss == "cross_entropy":
        return F.cross_entropy
    targets = torch.randn(
        run.classes, run.classes, generator=torch.Generator().manual_seed(derive_seed(cfg.seed, "targets"))
    )
    return lambda outputs, y: F.mse_loss(outputs, targets.to(outputs)[y])


def build_pipeline(cfg: Config, model: nn.Sequential, run: Run, pp: World) -> Any:
    """Place the stages: all of them on this process's devices, or this rank's own ones in its group's pipeline."""
    pipeline = cfg.make_pipeline_config()
    stages = model_split.split_model(pipeline, model, run)
    if not cfg.in_one_process:
        return model_split.build_pipeline(pipeline, stages, build_loss(cfg, run), run, pp)
    sizes: Any = {"size": cfg.batch_plan.microbatch, "microbatches": cfg.batch_plan.microbatches, "dtype": run.dtype}
    how: Any = {"schedule": pipeline.schedule, "pipelined": cfg.mode == "pipelined"}
    return SingleProcessPipeline(stages, build_loss(cfg, run), cfg.devices, **sizes, **how)


def main(cfg: Config, run: Run) -> None:
    pp, dp = create_mesh_groups(run.world, cfg.replicas)  # this rank's pipeline, and the replicas of its stages
    shard = dp.rank, dp.size
    names = model_split.require_devices(cfg.devices) if cfg.in_one_process else []
    devices = [torch.device(name) for name in names] or [run.device]
    with limit_memory(cfg.memory_cap, devices) as taken:
        pipe = build_pipeline(cfg, build_model(cfg, run), run, pp)
        optimizer = build_optimizer(pipe.module.parameters(), cfg.optim)
        batches = run.batches(shard=shard, inputs=pipe.has_first, targets=pipe.has_last)
        peers = dp if cfg.replicas > 1 else None
        state = TrainState(list(pipe.local.values()), optimizer, batches, run.world, peers=peers)

        def evaluate() -> dict[str, float]:
            sync_batchnorm.average_buffers(pipe.module, dp.group)  # the replicas' BatchNorm has seen other samples
            return score_test_set(pipe.predict, run, inputs=pipe.has_first, shard=shard)

        run.resume(state)
        for step in run.steps(state, evaluate, loss=pipe.last_rank):
            with step:
                optimizer.zero_grad()
                loss = pipe.step(step.x, step.y)  # every microbatch forward and backward
                if peers:  # the mean over the shards is the gradient of the batch's mean loss, and so with the loss
                    averaged = [p.grad for p in pipe.module.parameters() if p.grad is not None]
                    sync_batchnorm.average_tensors(averaged if loss is None else [*averaged, loss], dp.group)
                optimizer.step()  # each rank updates its own stages
                step.log(loss=loss)
    run.report(gather_device_facts(cfg, run, devices, taken), report_pipeline(cfg, run, pipe, pp))


def gather_device_facts(cfg: Config, run: Run, devices: list[torch.device], taken: dict[str, int]) -> Facts:
    """Gather from all ranks which device held what; `taken` are bytes for training by device. All ranks call it."""
    own = [sum(rank.values()) for rank in run.world.gather(taken)]
    trained = taken if cfg.in_one_process else {f"rank {rank}": each for rank, each in enumerate(own)}
    held = {str(device): read_peak_memory(device) for device in devices} if cfg.in_one_process else run.memory
    count = cfg.make_pipeline_config().stages_per_process
    stages = "all layers" if cfg.mode == "single" else f"{count} stages" if count > 1 else "a stage"
    shown = {
        "mode": f"{cfg.mode}, {cfg.model}, {describe_microbatches(cfg)}",
        "devices": f"{', '.join(cfg.devices)} in one process" if cfg.in_one_process else f"one rank holds {stages}",
        "peak memory": describe_peak_memory(held, run.device),
        "training memory": format_megabytes(trained)
        + ("reserved by torch" if run.device.type == "cuda" else "of writable address space, beyond that at the start")
        + (f"; memory_cap={cfg.memory_cap} is the limit" if cfg.memory_cap else ""),
    }
    return Facts(shown, measured={"training_bytes": max(trained.values(), default=0)}, memory=held)


def describe_microbatches(cfg: Config) -> str:
    """Return the microbatches in words, as in "4 microbatches of 16"."""
    words = f"{cfg.batch_plan.microbatches} microbatches of {cfg.batch_plan.microbatch}"
    return words + (f", in each of {cfg.replicas} replicas" if cfg.replicas > 1 else "")


def report_pipeline(cfg: Config, run: Run, pipe: Any, pp: World) -> PipelineReport:
    """Report idle shares and one step of the first replica. All ranks call it."""
    model = f"{cfg.model}, {cfg.mode}, batch {cfg.batch}"
    folder = run.folder.path if cfg.plot else None
    if not cfg.in_one_process:
        return PipelineReport.gather(pipe, pp, cfg.make_pipeline_config(), folder, model)
    title = f"one step of {model}, 1 rank: {describe_microbatches(cfg)}"
    own: Any = {"layers": pipe.layers, "lane": "stage", "picture": (folder / "timeline.png", title) if folder else None}
    return PipelineReport.from_spans(pipe.collect_spans(), pipe.plan, len(pipe.layers), **own)


if __name__ == "__main__":
    start(main, Config)
