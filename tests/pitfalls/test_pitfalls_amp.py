"""Mistakes of accumulation and mixed precision: what they do, and what this repository does instead.

The mistakes replace functions of the experiment (tests/harness/parity/amp_cases.py). A forward outside no_sync needs
two ranks: tests/experiments/test_amp.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.data import loader
from common.data.prepare import prepare_digits
from common.data.samples import Images
from common.measure.memory import MemoryMeter
from common.models.networks import SimpleNN
from common.training import optimizers
from common.training.loop import Step
from configs.amp_accum import Config as AmpConfig
from configs.shared import Optim, Regularization
from experiments import amp_accum
from tests.harness.parity.amp_cases import MISTAKES
from tests.harness.parity.method import replace_attributes

CPU = torch.device("cpu")


class ClippingStep(Step):
    """A step outside of a run, whose logged values are discarded."""

    def __init__(self) -> None:
        self.run: Any = SimpleNamespace(cfg=AmpConfig(), state=SimpleNamespace(has_stages=False))
        self.values = {}


def draw_batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 28, 28), torch.randint(10, (count,))


def compute_gradient(cfg: AmpConfig, model: nn.Module, window: Any, scaler: Any = None) -> torch.Tensor:
    """Return the gradient after a window as one vector."""
    disabled = amp_accum.make_scaler(AmpConfig(precision="fp32"), CPU)
    model.zero_grad()
    step: Any = SimpleNamespace(
        batch=window, mean_shard=len(window[0][1]), mark_backward=lambda: None, log=lambda **values: None
    )
    run: Any = SimpleNamespace(loss=nn.functional.cross_entropy)
    amp_accum.accumulate_gradients(cfg, run, model, scaler or disabled, step, MemoryMeter(CPU))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_without_the_divisor_steps_are_as_many_times_too_long() -> None:
    cfg = AmpConfig(precision="fp32")
    model = SimpleNN().double()
    images, labels = draw_batch(16)
    images = images.double()
    window = list(zip(images.split(4), labels.split(4), strict=True))
    expected = compute_gradient(cfg, model, [(images, labels)])
    assert torch.allclose(compute_gradient(cfg, model, window), expected, atol=1e-12)
    with replace_attributes(*MISTAKES["no_divisor"]):
        assert torch.allclose(compute_gradient(cfg, model, window), 4 * expected, atol=1e-12)
    # with a constant divisor, a last window of three microbatches gives three quarters of a step
    expected_short = compute_gradient(cfg, model, window[:3])
    with replace_attributes(*MISTAKES["same_divisor"]):
        assert torch.allclose(compute_gradient(cfg, model, window[:3]), 0.75 * expected_short, atol=1e-12)


def test_a_step_every_n_batches_leaks_the_last_window_into_the_next_epoch(cache: Path) -> None:
    layer = nn.Linear(1, 1, bias=False)
    gradients_per_step = []
    for _ in range(2):  # epochs of ten microbatches
        for i in range(10):
            layer(torch.ones(1)).backward()
            if (i + 1) % 4 == 0:
                assert layer.weight.grad is not None
                gradients_per_step.append(layer.weight.grad.item())  # each gradient is 1
                layer.zero_grad()
    assert gradients_per_step == [4, 4, 6, 4], "two microbatches of the first epoch are used in the second epoch"
    images = Images(prepare_digits(cache), "train", limit=105)
    windows = loader.Loader(images, 10, 0, CPU, torch.float32, microbatches=4)
    for _ in range(2):
        assert [len(window) for window in windows] == [4, 4, 2]
    assert windows.steps == 3
    assert windows.count_samples(5) == 100 + 80


def test_without_zero_grad_steps_grow_and_one_overflow_ends_the_training() -> None:
    def take_steps(precision: Any, zero_grad: bool, overflow: int = 0) -> tuple[float, ...]:
        """Return the lengths of six steps with a gradient of 1, or infinity in step number `overflow`."""
        cfg = AmpConfig(precision=precision, init_scale=1024)
        layer = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1)
        scaler = amp_accum.make_scaler(cfg, CPU)
        lengths: list[float] = []
        for number in range(1, 7):
            before = layer.weight.item()
            if zero_grad:
                optimizer.zero_grad()
            with amp_accum.make_autocast(cfg, CPU):
                loss = layer(torch.ones(1, 1)).sum()
            if number == overflow:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            amp_accum.update_weights(cfg, layer, optimizer, scaler, ClippingStep())
            lengths.append(before - layer.weight.item())
        return tuple(lengths)

    def about(*lengths: float) -> Any:
        return pytest.approx(lengths, abs=1e-2)

    assert take_steps("bf16", zero_grad=True) == about(1, 1, 1, 1, 1, 1)
    assert take_steps("fp16", zero_grad=True) == about(1, 1, 1, 1, 1, 1)
    assert take_steps("bf16", zero_grad=False) == about(1, 2, 3, 4, 5, 6)
    # the gradients of earlier steps are unscaled repeatedly
    assert take_steps("fp16", zero_grad=False) == about(1, 1, 1, 1, 1, 1)
    assert take_steps("fp16", zero_grad=True, overflow=3) == about(1, 1, 0, 1, 1, 1)
    # infinity stays in the gradient
    assert take_steps("fp16", zero_grad=False, overflow=3) == about(1, 1, 0, 0, 0, 0)


def flatten_parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_clipping_before_unscaling_clips_the_scale() -> None:
    cfg = AmpConfig(precision="fp16", regularization=Regularization(clip=0.01))

    def measure_step_length() -> float:
        """Return the length of a step of SGD with a learning rate of 1."""
        torch.manual_seed(0)
        model = SimpleNN()
        before = flatten_parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        scaler = amp_accum.make_scaler(cfg, CPU)
        compute_gradient(cfg, model, [draw_batch(8)], scaler)
        amp_accum.update_weights(cfg, model, optimizer, scaler, ClippingStep())
        return float((flatten_parameters(model) - before).norm())

    assert measure_step_length() == pytest.approx(0.01, rel=1e-3)
    with replace_attributes(*MISTAKES["clip_before_unscale"]):
        assert measure_step_length() < 1e-6


def test_bf16_needs_no_scaler_and_loses_steps_with_one() -> None:
    assert torch.finfo(torch.bfloat16).max > 1e38
    assert torch.tensor(1e-30).bfloat16() > 0
    assert torch.tensor(1e-8).half() == 0, "fp16 needs a scaler"
    assert torch.tensor(1e5).half().isinf()
    cfg = AmpConfig(precision="bf16", growth_interval=1)

    def count_skipped_steps() -> int:
        """Count the skipped steps of 200."""
        torch.manual_seed(0)
        model = SimpleNN()
        x, y = draw_batch(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0)
        scaler = amp_accum.make_scaler(cfg, CPU)
        count = 0
        for _ in range(200):
            compute_gradient(cfg, model, [(100 * x, y)], scaler)
            count += amp_accum.update_weights(cfg, model, optimizer, scaler, ClippingStep())
        return count

    assert count_skipped_steps() == 0
    with replace_attributes(*MISTAKES["scaler_for_bf16"]):
        assert count_skipped_steps() > 10, "the scale grows until it overflows float32"


def test_the_old_spelling_switches_itself_off_without_a_gpu() -> None:
    cfg = AmpConfig(precision="fp16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = amp_accum.make_scaler(cfg, CPU)
        with amp_accum.make_autocast(cfg, CPU):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float16
    assert scaler.is_enabled()
    assert not caught
    with (
        replace_attributes(*MISTAKES["old_spelling"]),
        pytest.warns(FutureWarning, match=r"torch\.amp\.GradScaler"),
    ):
        old_scaler = amp_accum.make_scaler(cfg, CPU)
    with pytest.warns(FutureWarning, match=r"torch\.amp\.autocast"), torch.cuda.amp.autocast():
        dtype = nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    if not torch.cuda.is_available():
        assert not old_scaler.is_enabled()
    assert dtype == torch.float32, "the old autocast has no effect on a CPU"


def test_fused_sgd_makes_momentum_of_what_lies_in_memory_where_its_first_step_is_left_out() -> None:
    def measure_momentum(optimizer: torch.optim.Optimizer, layer: nn.Linear) -> float:
        """Return the largest momentum after a first step with an infinite gradient."""
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        scaler.unscale_(optimizer)
        freed = [torch.full_like(layer.weight, 7.0) for _ in range(50)]
        del freed  # new tensors are likely to get this memory
        scaler.step(optimizer)
        assert layer.weight.isfinite().all(), "the step itself is skipped"
        return float(optimizer.state[layer.weight]["momentum_buffer"].abs().nan_to_num(nan=1e9).max())

    momenta_of_torch = []
    momenta = []
    for _ in range(10):
        layer = nn.Linear(784, 100)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1, momentum=0.9, fused=True)
        momenta_of_torch.append(measure_momentum(optimizer, layer))
    for _ in range(10):
        layer = nn.Linear(784, 100)
        momenta.append(measure_momentum(optimizers.build_optimizer(layer.parameters(), Optim(), scaled=True), layer))
    assert max(momenta_of_torch) > 0
    assert momenta == [0] * 10
