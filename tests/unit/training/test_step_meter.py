"""Measurement of a step: activations that are held at the same time, training state, and the measured step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.prepare import prepare_digits
from common.models import networks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.training.run import Run
from common.training.saved_tensors import SavedTensors
from common.training.step_meter import StepMeter
from configs.mnist_pipeline import Config
from configs.shared import Data, Log

WIDTH = 8
SAMPLES = 16
ACTIVATION_BYTES = 4 * WIDTH * SAMPLES


class Sine(nn.Module):
    """A layer without parameters that saves its input for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.fixture
def network() -> nn.Sequential:
    """A linear layer and a sine. A backward pass needs the input of the network and the input of the sine."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Sine())


def test_activations_of_several_forward_passes_add_up_until_their_backward(network: nn.Sequential) -> None:
    batches = [torch.randn(SAMPLES, WIDTH) for _ in range(3)]
    saved = SavedTensors([network])
    with saved:
        outputs = [network(x) for x in batches]
        assert saved.bytes == saved.peak_bytes == 3 * 2 * ACTIVATION_BYTES
        outputs.pop().sum().backward()
        assert saved.bytes == 2 * 2 * ACTIVATION_BYTES
        for output in outputs:
            output.sum().backward()
    assert (saved.bytes, saved.peak_bytes) == (0, 3 * 2 * ACTIVATION_BYTES)


def test_microbatches_one_after_the_other_hold_the_activations_of_one(network: nn.Sequential) -> None:
    saved = SavedTensors([network])
    with saved:
        for _ in range(3):
            network(torch.randn(SAMPLES, WIDTH)).sum().backward()
    assert saved.peak_bytes == 2 * ACTIVATION_BYTES


def test_of_the_storage_of_several_batches_only_the_batch_is_counted(network: nn.Sequential) -> None:
    batches = torch.randn(8, SAMPLES, WIDTH)
    saved = SavedTensors([network])
    with saved:
        network(batches[3]).sum().backward()
    assert saved.peak_bytes == 2 * ACTIVATION_BYTES


class Errors:
    """State of a technique that differs between ranks."""

    def state_dict(self) -> dict[str, object]:
        return {"errors": {0: torch.zeros(10)}, "step": 3, "random": torch.get_rng_state()}


def train(run: Run, meter: StepMeter, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in run.steps(dict):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(step.x), step.y)
        loss.backward()
        optimizer.step()
        if step.number == 1:
            assert not meter.memory, "the step has not ended"


@pytest.mark.parametrize("number", [0, 2, 9])
def test_one_step_is_measured(number: int, attempt_folder: RunFolder, cache: Path, world: World) -> None:
    """The momentum, which the first step creates, belongs to the training state.

    If the run has fewer steps than `log.memory`, the last one is measured.
    """
    log = Log(memory=number, progress="none")
    cfg = Config(batch=16, steps=2, data=Data(name="digits"), log=log)
    run = Run(cfg, attempt_folder, Ranks(world), prepare_digits(cache))
    model = networks.SimpleNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.register(model, optimizer, run.batches())
    meter = run.add_step_meter()
    assert run.add_step_meter() is meter
    assert meter.steps_to_wait == max(1, number) - 1
    train(run, meter, model, optimizer)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert meter.state_bytes == 3 * size
    report = meter.gather_report(world)
    assert report.measured["rank_state_bytes"] == [meter.state_bytes]
    assert report.measured["rank_activation_bytes"] == [meter.memory["activations"]]
    assert report.measured["rank_sent_bytes"] == [0]


def test_state_that_differs_between_ranks_belongs_to_the_training_state(network: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(network.parameters())
    meter = StepMeter([network], optimizer, local_parts={"compression": Errors()})  # type: ignore[dict-item]
    meter.before_step()
    network(torch.randn(SAMPLES, WIDTH)).sum().backward()
    meter.collect_values()
    assert meter.memory["local"] == 40
    assert meter.state_bytes == 2 * meter.memory["parameters"] + 40


def test_a_repeated_step_is_measured_once(network: nn.Sequential) -> None:
    """The first attempt at the step fails, and its activations do not count."""
    meter = StepMeter([network], torch.optim.SGD(network.parameters()))
    held = []
    for samples in (4 * SAMPLES, SAMPLES):
        meter.before_step()
        assert len(network._forward_pre_hooks) == 1
        held.append(network(torch.randn(samples, WIDTH)))
    held[1].sum().backward()
    meter.collect_values()
    assert meter.memory["activations"] == 2 * ACTIVATION_BYTES
    assert not network._forward_pre_hooks
