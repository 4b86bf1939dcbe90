"""Model parallelism: a ResNet partitioned into stages, which run one at a time or as a pipeline.

    python experiments/resnet_modelparallel.py                                   two stages, GPipe
    python experiments/resnet_modelparallel.py mode=naive                        one stage at a time
    python experiments/resnet_modelparallel.py mode=single                       the unsplit model
    python experiments/resnet_modelparallel.py schedule=zero_bubble stages=3     another schedule, three ranks
    python experiments/resnet_modelparallel.py model=resnet50 data.image_size=64 split=[layer3_0]
    python experiments/resnet_modelparallel.py replicas=2                        two pipelines, half of the batch each
    python experiments/resnet_modelparallel.py devices=[cuda:0,cuda:1]           one process, two GPUs
    python experiments/resnet_modelparallel.py model=toy data.name=vectors loss=mse      10-10-5, random targets
    python experiments/resnet_modelparallel.py sweep=true                        all modes and microbatch sizes

A run takes one to three minutes on 2 CPU cores; the sweep takes longer. With two stages, expect the pipelined mode to
take less time than the naive mode, but more than half of the naive mode's time. A single process that uses
both cores is usually faster.

A batch is split into microbatches of `split_size` samples. In naive mode, a microbatch passes forward and backward
through all stages before the next one starts, so only one of p stages computes at a time. In a pipeline (GPipe: Huang
et al. 2019, arXiv 1811.06965; interleaved 1F1B: Narayanan et al. 2021, arXiv 2104.04473; zero bubble: Qi et al. 2023,
arXiv 2401.10241), stage 1 processes microbatch 0 while stage 0 processes microbatch 1. With m microbatches of equal
cost, each stage is idle for (p - 1) / (m + p - 1) of the time, which is called the bubble. Smaller microbatches reduce
the bubble but are computed less efficiently.

With `replicas`, several pipelines train on shards of the batch, and the replicas of a stage average their gradients.
Between hosts, only gradients are sent, once per step. `memory_cap` demonstrates why a model is split: a model
that exceeds the memory of one rank fits into the memory of two ranks.

BatchNorm computes its statistics per microbatch and updates its running statistics after each microbatch. The unsplit
model does the same if it accumulates gradients over the same microbatches (mode=single with a `split_size`). Therefore,
`split_size` affects training in every mode.
"""

from __future__ import annotations

from common.api import ReportData, ResNet, Run, build_network, build_optimizer, start
from common.measure.memory import describe_peak_memory, format_megabytes, limit_memory, read_peak_memory
from common.models.model_file import load_initial_weights
from common.models.networks import Toy
from common.models.sample_dropout import add_dropout
from common.ranks.averaging import average_tensors
from common.ranks.rendezvous import World
from common.runs.result import Report
from common.system.seeds import derive_seed
from common.techniques.pipeline import model_split
from common.techniques.pipeline.executor import LossFunction
from common.techniques.pipeline.mesh import create_mesh_groups
from common.techniques.pipeline.report import PipelineReport
from common.techniques.pipeline.single_process import SingleProcessPipeline
from common.techniques.recompute import recompute_blocks
from configs.networks import get_network_name
from configs.resnet_modelparallel import Config

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def build_model(cfg: Config, run: Run) -> nn.Sequential:
    """Build the unsplit model. All ranks use the same seed and therefore have equal weights."""
    model: nn.Sequential
    if cfg.model == "toy":
        model = Toy(run.sample_shape, run.outputs)
    elif ":" in cfg.model:
        model = build_network(cfg.model, run.sample_shape, run.outputs)
    else:
        model = ResNet(cfg.model, run.sample_shape, run.outputs, width=cfg.width)
    load_initial_weights(model, cfg.initial.weights, cfg.runs)
    add_dropout(model, cfg.regularization.dropout, cfg.seed)
    recompute_blocks(model, cfg.memory.recompute)  # residual blocks discard activations until backward needs them
    return model.to(memory_format=torch.channels_last) if cfg.channels_last else model


def build_loss(cfg: Config, run: Run) -> LossFunction:
    """Return the loss of the setting `loss`.

    With loss=mse, each class has one random target vector unless the data set has float targets.
    """
    if cfg.loss != "mse" or not run.train_set.has_labels:
        return run.loss
    generator = torch.Generator().manual_seed(derive_seed(cfg.seed, "targets"))
    targets = torch.randn(run.outputs, run.outputs, generator=generator)
    return lambda outputs, labels: F.mse_loss(outputs, targets.to(outputs)[labels])


def build_pipeline(cfg: Config, model: nn.Sequential, run: Run, pp: World) -> Any:
    """Build the pipeline engine.

    The engine holds all stages if a single process uses all devices. Otherwise, the engine holds this rank's stages and
    communicates with the other ranks of `pp`.
    """
    pipeline = cfg.make_pipeline_config()
    stages = model_split.split_model(pipeline, model, run)
    loss = build_loss(cfg, run)
    if not cfg.in_one_process:
        return model_split.build_pipeline_engine(pipeline, stages, loss, run, pp)
    return SingleProcessPipeline(
        stages,
        loss,
        cfg.devices,
        size=cfg.batch_plan.microbatch,
        microbatches=cfg.batch_plan.microbatches,
        schedule=pipeline.schedule,
        pipelined=cfg.mode == "pipelined",
        dtype=run.dtype,
    )


def main(cfg: Config, run: Run) -> None:
    pp, dp = create_mesh_groups(run.world, cfg.replicas)  # the pipeline of this rank, and the replicas of its stages
    peers = dp if cfg.replicas > 1 else None
    devices = list_devices(cfg, run)
    remedy = "split the model (stages=, mode=pipelined), recompute activations (recompute=blocks), lower batch"
    with limit_memory(cfg.memory_cap, devices, remedy) as training_bytes:
        pipe = build_pipeline(cfg, build_model(cfg, run), run, pp)
        optimizer = build_optimizer(pipe.module.parameters(), cfg.optim)
        if cfg.state_sharding.zero1:
            from common.techniques.sharded_optimizer import divide_optimizer_state  # few runs need this module

            divide_optimizer_state(run, dp.group)  # each replica of a stage updates some of its parameters
        batches = run.batches(shard=(dp.rank, dp.size), inputs=pipe.has_first_stage, targets=pipe.has_last_stage)
        run.register(pipe, optimizer, batches, peers=peers)

        for step in run.steps():
            optimizer.zero_grad()
            loss = pipe.step(step.x, step.y)  # forward and backward of all microbatches
            if peers:  # the mean over the shards gives the gradient and the loss of the whole batch
                averaged = [p.grad for p in pipe.module.parameters() if p.grad is not None]
                if loss is not None:
                    averaged.append(loss)
                average_tensors(averaged, dp.group)
            step.clip_gradients(pipe.module.parameters(), cfg.regularization.clip)  # by the norm over all stages
            optimizer.step()  # each rank updates its own stages
            step.log(loss=loss)
    facts = gather_device_facts(cfg, run, devices, training_bytes)
    reports: list[Report] = [facts, report_pipeline(cfg, run, pipe, pp)]
    if cfg.log.memory and not cfg.in_one_process:
        from common.techniques.pipeline.step_formulas import report_step_formulas  # few runs measure memory

        reports.append(report_step_formulas(cfg.memory, cfg.state_sharding, run, pipe, dp))
    run.report(*reports)


def list_devices(cfg: Config, run: Run) -> list[torch.device]:
    """Return the devices of this rank. Raises UserError if one of the devices does not exist."""
    names = model_split.check_devices_exist(cfg.devices) if cfg.in_one_process else []
    return [torch.device(name) for name in names] or [run.device]


def gather_device_facts(
    cfg: Config, run: Run, devices: list[torch.device], training_bytes: dict[str, int]
) -> ReportData:
    """Gather the stages and the memory of every device. All ranks must call this function.

    `training_bytes` contains, for each device of this rank, the additional bytes that training needed.
    """
    gathered = run.world.gather(training_bytes)
    if cfg.in_one_process:
        placement = f"{', '.join(cfg.devices)} in one process"
        peak_bytes = {str(device): read_peak_memory(device) for device in devices}
    else:
        placement = f"each rank holds {describe_stages(cfg)}"
        peak_bytes = run.memory
        training_bytes = {f"rank {rank}": sum(by_device.values()) for rank, by_device in enumerate(gathered)}

    is_cuda = run.device.type == "cuda"
    kind = "reserved by torch" if is_cuda else "of writable address space, in addition to that at startup"
    limit = f"; the limit is memory_cap={cfg.memory_cap}" if cfg.memory_cap else ""
    lines = {
        "mode": f"{cfg.mode}, {get_network_name(cfg.model)}, {describe_microbatches(cfg)}",
        "devices": placement,
        "peak memory": describe_peak_memory(peak_bytes, run.device),
        "training memory": format_megabytes(training_bytes) + kind + limit,
    }
    highest = max(training_bytes.values(), default=0)
    return ReportData(lines, measured={"training_bytes": highest}, memory=peak_bytes)


def describe_stages(cfg: Config) -> str:
    """Describe the stages that one rank holds."""
    if cfg.mode == "single":
        return "all layers"
    count = cfg.make_pipeline_config().stages_per_process
    return f"{count} stages" if count > 1 else "a stage"


def describe_microbatches(cfg: Config) -> str:
    """Describe the division of a batch, for example "4 microbatches of 16"."""
    plan = cfg.batch_plan
    replicas = f", in each of {cfg.replicas} replicas" if cfg.replicas > 1 else ""
    return f"{plan.microbatches} microbatches of {plan.microbatch}{replicas}"


def report_pipeline(cfg: Config, run: Run, pipe: Any, pp: World) -> PipelineReport:
    """Report the idle shares and the timeline of one step of the first replica.

    All ranks must call this function.
    """
    model = f"{get_network_name(cfg.model)}, {cfg.mode}, batch {cfg.batch}"
    if not cfg.in_one_process:
        return PipelineReport.gather(pipe, pp, cfg.make_pipeline_config(), run.folder.path, model)
    title = f"one step of {model}, 1 rank: {describe_microbatches(cfg)}"
    picture = (run.folder.path / "timeline.png", title) if cfg.pipeline.plot else None
    spans = pipe.collect_spans()
    stages = len(pipe.layers)
    return PipelineReport.from_spans(spans, pipe.plan, stages, layers=pipe.layers, lane="stage", picture=picture)


if __name__ == "__main__":
    start(main, Config)
