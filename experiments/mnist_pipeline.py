"""Pipeline parallelism on MNIST: a network partitioned into stages that work at the same time.

    python experiments/mnist_pipeline.py                                   two stages, GPipe, 4 microbatches
    python experiments/mnist_pipeline.py schedule=1f1b stages=3            another schedule, three ranks
    python experiments/mnist_pipeline.py engine=torch schedule=zero_bubble torch.distributed.pipelining
    python experiments/mnist_pipeline.py stages=1 microbatches=1           the unsplit model, to compare with
    python experiments/mnist_pipeline.py --help                            every key

Takes about 15 s on 2 CPU cores. Expect 98 % test accuracy on MNIST (without MNIST: on the built-in digits), and an
idle share above the ideal bubble: the stages are unequal, and this network is so small that messages cost as much as
the arithmetic they overlap with. `width=1024 batch=1024` turns that round.

Each rank holds one stage. A batch is split into m microbatches; while stage 1 works on microbatch 0, stage 0 works on
microbatch 1. Every microbatch's loss counts by its share of the batch, so the summed gradients equal those of the
unsplit model. With p stages of equal cost each rank idles (p - 1) / (m + p - 1) of a step: the bubble (GPipe: Huang et
al. 2019, arXiv 1811.06965). A schedule is a list of forwards and backwards for each rank
(common/pipeline/schedules.py), which `pipe.step` executes (common/pipeline/executor.py): 1f1b keeps fewer activations
(Harlap et al. 2018, arXiv 1806.03377), interleaved_1f1b and zero_bubble have smaller bubbles (Narayanan et al. 2021,
arXiv 2104.04473; Qi et al. 2023, arXiv 2401.10241).
"""

from __future__ import annotations

from common.api import PipelineReport, Run, TrainState, build_optimizer, model_split, networks, score_test_set, start
from configs.mnist_pipeline import Config

import torch.nn.functional as F


def main(cfg: Config, run: Run) -> None:
    model = networks.SimpleNN(cfg.width, cfg.depth, run.sample_shape, run.classes)  # every rank draws the same weights
    stages = model_split.split_model(cfg, model, run)  # at named layers, by parameter counts, or by measured times
    pipe = model_split.build_pipeline(cfg, stages, F.cross_entropy, run)  # this rank keeps its own stages
    optimizer = build_optimizer(pipe.module.parameters(), cfg.optim)
    batches = run.batches(inputs=pipe.has_first, targets=pipe.has_last)  # the first stage sees images, the last labels
    state = TrainState(list(pipe.local.values()), optimizer, batches, run.world)

    for step in run.steps(state, lambda: score_test_set(pipe.predict, run, inputs=pipe.has_first), loss=pipe.last_rank):
        with step:
            optimizer.zero_grad()
            loss = pipe.step(step.x, step.y)  # every microbatch forward and backward, in the order of the schedule
            optimizer.step()  # each rank updates its own stages
            step.log(loss=loss)
    words = f"SimpleNN (width {cfg.width}, depth {cfg.depth}), batch {cfg.batch}"
    run.report(PipelineReport.gather(pipe, run.world, cfg, run.folder.path if cfg.plot else None, words))


if __name__ == "__main__":
    start(main, Config)
