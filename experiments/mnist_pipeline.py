"""Pipeline parallelism on MNIST: a network cut into stages that work at the same time.

    python experiments/mnist_pipeline.py                                   two stages, GPipe, 4 microbatches
    python experiments/mnist_pipeline.py schedule=1f1b stages=3            another schedule, three processes
    python experiments/mnist_pipeline.py engine=torch schedule=zero_bubble the library's engine
    python experiments/mnist_pipeline.py stages=1 microbatches=1           the unsplit model, to compare with
    python experiments/mnist_pipeline.py --help                            every key

Takes about 15 s on 2 CPU cores. Expect 98 % test accuracy on MNIST (without MNIST: on the built-in
digits), and an idle share above the ideal bubble: the stages are unequal, and this network is so small that
messages cost as much as the arithmetic they overlap with. `width=1024 batch=1024` turns that round.

How it works. Each process holds one stage. A batch is cut into microbatches; while stage 1 works on
the first, stage 0 works on the second. The gradient of the mean loss is the sum over microbatches of
each one's share, so the result equals that of the unsplit model. With p stages and m microbatches of
equal cost, each process waits (p - 1) / (m + p - 1) of the time: the bubble.
"""

from __future__ import annotations

import common  # isort: skip  # noqa: F401 (first: it answers Ctrl-C while torch is imported)
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import Optimizer

from common.checkpoint.train_state import TrainState
from common.data import loader as data
from common.distributed.rendezvous import World
from common.measure import tables
from common.models.networks import SimpleNN
from common.pipeline.executor import Pipeline
from common.pipeline.report import PipelineReport
from common.training import loop, model_split, optimizers
from common.training.entry_point import start
from common.training.evaluate import classify
from common.training.run import Run
from configs.mnist_pipeline import Config


def build(cfg: Config, world: World, run: Run, dtype: torch.dtype) -> Pipeline:
    """The model, cut into stages, of which this process keeps its own."""
    model = SimpleNN(cfg.width, cfg.depth)  # one seed: the same weights in every process
    parts = model_split.choose(cfg, model, torch.randn(cfg.batch // cfg.microbatches, *data.IMAGE), run)
    return model_split.engine(cfg)(cfg, parts, F.cross_entropy, world, batch=cfg.batch, sample=data.IMAGE, dtype=dtype)


def train_epoch(
    cfg: Config, pipe: Pipeline, optimizer: Optimizer, loader: data.Loader, run: Run, step: int, total: int
) -> int:
    """Train on the rest of the loader's epoch, or up to `total` steps; returns the steps done since the start."""
    pipe.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = pipe.step(x, y)  # every microbatch forward and backward, in the order of the schedule
        optimizers.set_rate(optimizer, optimizers.rate(cfg.optim, step, total, cfg.batch))
        optimizer.step()  # each process updates its own stages
        step += 1
        run.log(step, loss=loss)
        run.checkpoint_or_stop(step)  # saves now and then, and leaves if it was told to
        if step == total:
            break
    return step


def main(cfg: Config, world: World, run: Run) -> None:
    dtype = getattr(torch, cfg.dtype)
    train, test = data.load_train_test(run.prepared, cfg.data)
    pipe = build(cfg, world, run, dtype)
    optimizer = optimizers.make(pipe.module.parameters(), cfg.optim)
    ends: Any = {"inputs": pipe.has_first, "targets": pipe.has_last}  # the first stage sees images, the last one labels
    loader = data.Loader.from_config(train, cfg, world.device, **ends)
    run.source, run.total = pipe.last_rank, loop.total_steps(cfg, loader)

    def evaluate() -> dict[str, float]:
        pipe.train(False)
        size, first = cfg.eval_batch, pipe.has_first
        return classify(pipe.predict, test, world, batch=size, dtype=dtype, inputs=first, look=run.look)

    step = run.resume(TrainState(list(pipe.local.values()), optimizer, loader, world, replicated=False))
    scores = loop.train(
        run, loader, step, lambda done: train_epoch(cfg, pipe, optimizer, loader, run, done, run.total), evaluate
    )
    conclude(cfg, world, run, pipe, scores)


def conclude(cfg: Config, world: World, run: Run, pipe: Pipeline, scores: dict[str, float]) -> None:
    """The result file and the table."""
    seconds, rate = run.step_seconds(), run.samples_per_second()
    spans = world.gather(pipe.spans())
    if not world.is_main:
        return
    pipeline = PipelineReport.of(spans, pipe.plan, cfg.stages)
    speed = {"samples_per_second": rate, "step_seconds": seconds}
    run.finish(**scores, **speed, data=run.prepared.name, stages=pipe.layers, **pipeline.result())
    rows = loop.rows(run, world, scores) | {
        "schedule": f"{cfg.schedule} ({cfg.engine}), {cfg.stages} stages, {cfg.microbatches} microbatches",
        "stages": " | ".join(" ".join(names) for names in pipe.layers),
    }
    drawn = pipeline.plot(run.folder.path, f"one step of mnist_pipeline, {cfg.schedule}") if cfg.plot else {}
    run.say(tables.table(rows | pipeline.rows() | drawn | run.places()))


if __name__ == "__main__":
    start(main, Config)
