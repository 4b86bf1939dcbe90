"""A step costs what the GPU takes for it, not what giving it the work takes. The GPU is played: it has a queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.checkpoint.checkpointer import CheckpointState
from common.checkpoint.save_or_stop_vote import Decision, SaveOrStopVote
from common.checkpoint.saver import Saver
from common.checkpoint.stop_request import StopRequest
from common.checkpoint.train_state import TrainState
from common.data import loader as data
from common.data import prepare
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.training.run import Run
from configs.mnist_pipeline import Config
from configs.shared import Checkpoint, Data
from tests.harness.images import load_train_test

GIVE, WORK = 0.001, 0.1  # seconds of a step on the host, and then on the GPU


class Played:
    """The host's time, and the GPU's work that is still to be done."""

    def __init__(self) -> None:
        self.now = self.queued = 0.0
        self.waits = 0

    def step(self) -> None:
        self.now += GIVE
        self.queued += WORK

    def synchronize(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)
        self.now, self.queued, self.waits = self.now + self.queued, 0.0, self.waits + 1


class Saved(TrainState):
    """What is saved has to be computed before."""

    gpu: Played

    def collect_state(self) -> CheckpointState:
        self.gpu.synchronize(torch.device("cuda", 0))
        return super().collect_state()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(torch.cuda, "synchronize", played.synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: played.now)
    return played


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A real group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    dist.destroy_process_group()


def train(gpu: Played, world: World, cache: Path, folder: Path, epoch: int, every: int, total: int, cuda: bool) -> Run:
    """A run whose epochs have so many steps, that saves every so many, and has nothing to compute."""
    cfg = Config(
        steps=total,
        epochs=-(-total // epoch),
        data=Data(name="digits", cache=str(cache)),
        checkpoint=Checkpoint(every_steps=every, every_seconds=0),
    )
    prepared = prepare.prepare_dataset(cfg.data)
    images, _ = load_train_test(prepared, cfg.data)
    folder.mkdir()
    with open(folder / "stacks", "w") as log:
        run = Run(cfg, RunFolder(folder).claim_attempt(), Ranks(world), prepared, StopRequest(60, log))
        model = nn.Linear(1, 1)
        loader = data.Loader(images, len(images) // epoch, 0, world.device, torch.float32)
        assert loader.steps == epoch
        training = Saved([model], torch.optim.SGD(model.parameters()), loader)
        training.gpu = gpu
        training.gpus = {torch.device("cuda", 0)} if cuda else set()

        def evaluate() -> dict[str, float]:
            gpu.synchronize(torch.device("cuda", 0))  # as who reads a result
            gpu.now += 5
            return {"test_loss": 1.0, "test_accuracy": 1.0, "test_samples": 1}

        run.set_up_training(training, evaluate, loss_rank=0)
        for step in run.steps():
            gpu.step()
            step.log(loss=1.0)
        run.close()
    return run


@pytest.mark.parametrize(("epoch", "every", "total"), [(100, 0, 12), (100, 0, 1000), (15, 0, 40), (100, 3, 40)])
def test_steady_steps_are_those_of_the_gpu(
    epoch: int, every: int, total: int, gpu: Played, world: World, cache: Path, tmp_path: Path
) -> None:
    run = train(gpu, world, cache, tmp_path / "run", epoch, every, total, cuda=True)
    assert run.compute_step_seconds() == pytest.approx(GIVE + WORK)


def test_what_ranks_wait_for_each_other_between_steps_counts_and_saving_does_not(
    gpu: Played, world: World, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vote, save, took = SaveOrStopVote.vote_after_step, Saver.save, list[str]()

    def decide(self: SaveOrStopVote, step: int, diverged: bool, came: float, **facts: bool) -> Decision:
        gpu.now += 1
        took.append("vote")
        return vote(self, step, diverged, came, **facts)

    def write(self: Saver, step: int, *, best: bool = False) -> bool:
        gpu.now += 100
        took.append("save")
        return save(self, step, best=best)

    monkeypatch.setattr(SaveOrStopVote, "vote_after_step", decide)
    monkeypatch.setattr(Saver, "save", write)
    run = train(gpu, world, cache, tmp_path / "run", epoch=100, every=20, total=40, cuda=False)
    alone = took[: took.index("save") - 1].count("vote")  # that before a checkpoint is left out with it
    assert alone > 5 and max(run.pace.durations) == pytest.approx(1 + GIVE)
    assert sum(duration > 1 for duration in run.pace.durations[:19]) == alone


def test_nothing_waits_without_a_gpu(gpu: Played, world: World, cache: Path, tmp_path: Path) -> None:
    run = train(gpu, world, cache, tmp_path / "run", epoch=100, every=0, total=12, cuda=False)
    assert run.compute_step_seconds() == pytest.approx(GIVE) and gpu.waits == 2, (
        "the evaluation's own, and the checkpoint's"
    )
