"""The duration of a step includes the work of the GPU. The GPU is fake and has a queue of work."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from common.checkpoint.checkpointer import CheckpointState
from common.checkpoint.save_or_stop_vote import Decision, SaveOrStopVote
from common.checkpoint.saver import Saver
from common.checkpoint.stop_request import StopRequest
from common.checkpoint.train_state import TrainState
from common.data import prepare
from common.data.loader import Loader
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.training.run import Run
from configs.mnist_pipeline import Config
from configs.shared import Checkpoint, Data
from tests.harness.environment.prepared_images import load_train_test

HOST_SECONDS = 0.001  # time of a step on the host
GPU_SECONDS = 0.1  # time of a step on the GPU afterward
EVALUATION_SECONDS = 5
VOTE_SECONDS = 1
SAVE_SECONDS = 100


class FakeGpu:
    """A GPU with a queue of work, and the time of its host."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queued_seconds = 0.0
        self.waits = 0

    def step(self) -> None:
        self.now += HOST_SECONDS
        self.queued_seconds += GPU_SECONDS

    def synchronize(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)
        self.now += self.queued_seconds
        self.queued_seconds = 0.0
        self.waits += 1


class GpuTrainState(TrainState):
    """A train state whose tensors the fake GPU has to compute before they are saved."""

    gpu: FakeGpu

    def collect_state(self) -> CheckpointState:
        self.gpu.synchronize(torch.device("cuda", 0))
        return super().collect_state()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake_gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "synchronize", fake_gpu.synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: fake_gpu.now)
    return fake_gpu


@dataclasses.dataclass
class Trainer:
    """Trains a model that needs no computing, with the fake GPU."""

    gpu: FakeGpu
    world: World
    cache: Path
    folder: Path

    def evaluate(self) -> dict[str, float]:
        self.gpu.synchronize(torch.device("cuda", 0))  # reading a result waits for it
        self.gpu.now += EVALUATION_SECONDS
        return {"test_loss": 1.0, "test_accuracy": 1.0, "test_samples": 1}

    def train(self, *, epoch_steps: int, save_every: int = 0, steps: int, uses_gpu: bool) -> Run:
        """Train `steps` steps in epochs of `epoch_steps`, save after every `save_every` steps, and return the run."""
        cfg = Config(
            steps=steps,
            epochs=-(-steps // epoch_steps),
            data=Data(name="digits", cache=str(self.cache)),
            checkpoint=Checkpoint(every_steps=save_every, every_seconds=0),
        )
        prepared = prepare.prepare_dataset(cfg.data)
        images, _ = load_train_test(prepared, cfg.data)
        loader = Loader(images, len(images) // epoch_steps, 0, self.world.device, torch.float32)
        assert loader.steps == epoch_steps

        model = nn.Linear(1, 1)
        state = GpuTrainState([model], torch.optim.SGD(model.parameters()), loader)
        state.gpu = self.gpu
        state.gpus = {torch.device("cuda", 0)} if uses_gpu else set()

        self.folder.mkdir()
        with open(self.folder / "stacks", "w") as log:
            attempt = RunFolder(self.folder).claim_attempt()
            run = Run(cfg, attempt, Ranks(self.world), prepared, StopRequest(60, log))
            run.set_up_training(state, self.evaluate, loss_rank=0)
            for step in run.steps():
                self.gpu.step()
                step.log(loss=1.0)
            run.close()
        return run


@pytest.fixture
def trainer(gpu: FakeGpu, world: World, cache: Path, tmp_path: Path) -> Trainer:
    return Trainer(gpu, world, cache, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("epoch_steps, save_every, steps", [(100, 0, 12), (100, 0, 1000), (15, 0, 40), (100, 3, 40)])
def test_the_step_duration_includes_the_work_of_the_gpu(
    epoch_steps: int, save_every: int, steps: int, trainer: Trainer
) -> None:
    run = trainer.train(epoch_steps=epoch_steps, save_every=save_every, steps=steps, uses_gpu=True)
    assert run.compute_step_seconds() == pytest.approx(HOST_SECONDS + GPU_SECONDS)


def test_the_step_duration_includes_votes_but_not_saving(
    trainer: Trainer, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    vote_after_step = SaveOrStopVote.vote_after_step
    save = Saver.save
    events: list[str] = []

    def vote_slowly(self: SaveOrStopVote, step: int, diverged: bool, wait_start: float, **facts: bool) -> Decision:
        gpu.now += VOTE_SECONDS
        events.append("vote")
        return vote_after_step(self, step, diverged, wait_start, **facts)

    def save_slowly(self: Saver, step: int, *, best: bool = False) -> bool:
        gpu.now += SAVE_SECONDS
        events.append("save")
        return save(self, step, best=best)

    monkeypatch.setattr(SaveOrStopVote, "vote_after_step", vote_slowly)
    monkeypatch.setattr(Saver, "save", save_slowly)
    run = trainer.train(epoch_steps=100, save_every=20, steps=40, uses_gpu=False)

    before_save = events[: events.index("save") - 1]  # the vote before a checkpoint is excluded with the checkpoint
    votes = before_save.count("vote")
    assert votes > 5
    assert max(run.pace.durations) == pytest.approx(VOTE_SECONDS + HOST_SECONDS)
    assert sum(duration > VOTE_SECONDS for duration in run.pace.durations[:19]) == votes


def test_runs_without_a_gpu_do_not_wait_for_one(trainer: Trainer, gpu: FakeGpu) -> None:
    run = trainer.train(epoch_steps=100, steps=12, uses_gpu=False)
    assert run.compute_step_seconds() == pytest.approx(HOST_SECONDS)
    assert gpu.waits == 2, "only the evaluation and the checkpoint wait"
