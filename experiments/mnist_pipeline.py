"""Pipeline parallelism on MNIST: a network partitioned into stages that compute at the same time.

    python experiments/mnist_pipeline.py                                   two stages, GPipe, 4 microbatches
    python experiments/mnist_pipeline.py schedule=1f1b stages=3            another schedule, three ranks
    python experiments/mnist_pipeline.py schedule=zbv stages=4 stages_per_process=2 depth=3      two stages per rank
    python experiments/mnist_pipeline.py engine=torch schedule=zero_bubble torch.distributed.pipelining
    python experiments/mnist_pipeline.py stages=1 microbatches=1           the unsplit model, for comparison
    python experiments/mnist_pipeline.py --help                            all settings

A run takes about 15 s on 2 CPU cores. Expect a test accuracy of 98 % on MNIST. If MNIST is not available, the built-in
digits are used instead. The idle share is larger than the ideal bubble, because the stages are unequal and the network
is so small that communication takes as long as the computation that it overlaps with. With `width=1024 batch=1024`,
computation dominates.

Each rank holds one stage. A batch is split into m microbatches; while stage 1 processes microbatch 0, stage 0 processes
microbatch 1. The loss of a microbatch is weighted by its share of the batch, so the summed gradients equal those of the
unsplit model. With p stages of equal cost, each rank is idle for (p - 1) / (m + p - 1) of a step, which is called the
bubble (GPipe: Huang et al. 2019, arXiv 1811.06965). A schedule is a list of forward and backward passes for each rank.
Schedules are defined in common/techniques/pipeline/schedules.py and executed by `pipe.step` (executor.py in the same
folder).
The schedule 1f1b stores fewer activations (Harlap et al. 2018, arXiv 1806.03377). The schedules interleaved_1f1b,
zero_bubble, zbv and dualpipev have smaller bubbles (Narayanan et al. 2021, arXiv 2104.04473; Qi et al. 2023, arXiv
2401.10241; DeepSeek-AI 2024, arXiv 2412.19437).
"""

from __future__ import annotations

from common.api import Run, SimpleNN, build_network, build_optimizer, start
from common.models.sample_dropout import add_dropout
from common.techniques.pipeline import model_split
from common.techniques.pipeline.executor import PipelineEngine
from common.techniques.pipeline.report import PipelineReport
from configs.mnist_pipeline import Config
from configs.networks import get_network_name

from torch import nn


def build_model(cfg: Config, run: Run) -> nn.Sequential:
    """Build the unsplit model. All ranks use the same seed and therefore have equal weights."""
    network: nn.Sequential
    if cfg.model == "mlp":
        network = SimpleNN(cfg.width, cfg.depth, run.sample_shape, run.outputs)
    else:
        network = build_network(cfg.model, run.sample_shape, run.outputs)
    return add_dropout(network, cfg.regularization.dropout, cfg.seed)


def main(cfg: Config, run: Run) -> None:
    model = build_model(cfg, run)
    stages = model_split.split_model(cfg.pipeline, model, run)  # by layer names, parameter counts or measured times
    pipe = model_split.build_pipeline_engine(cfg.pipeline, stages, run.loss, run)  # keeps this rank's stages
    optimizer = build_optimizer(pipe.module.parameters(), cfg.optim)
    # The first stage needs the images, and the last stage needs the labels.
    batches = run.batches(inputs=pipe.has_first_stage, targets=pipe.has_last_stage)
    run.register(pipe, optimizer, batches)

    for step in run.steps():
        optimizer.zero_grad()
        loss = pipe.step(step.x, step.y)  # forward and backward of all microbatches, ordered by the schedule
        step.clip_gradients(pipe.module.parameters(), cfg.regularization.clip)  # by the norm over all stages
        optimizer.step()
        step.log(loss=loss)
    run.report(report_idle_shares(cfg, run, pipe))


def report_idle_shares(cfg: Config, run: Run, pipe: PipelineEngine) -> PipelineReport:
    """Report the idle share of each rank and, with plot=true, draw one step. All ranks must call this function."""
    name = f"SimpleNN (width {cfg.width}, depth {cfg.depth})" if cfg.model == "mlp" else get_network_name(cfg.model)
    model = f"{name}, batch {cfg.batch}"
    return PipelineReport.gather(pipe, run.world, cfg.pipeline, run.folder.path, model)


if __name__ == "__main__":
    start(main, Config)
