"""The mistakes of accumulation and mixed precision: what they really do, and what stands here instead.

The mistakes stand in for functions of the experiment: tests/harness/amp_parity.py. A forward outside no_sync needs two
processes: tests/experiments/test_amp.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.data import loader
from common.data.prepare import prepare_digits
from common.measure.memory import MemoryMeter
from common.models.networks import SimpleNN
from common.training import optimizers
from configs.amp_accum import Config as AmpConfig
from configs.shared import Optim
from experiments import amp_accum
from tests.harness.amp_parity import made


def a_window(batches: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, 28, 28), torch.randint(10, (n,))) for n in batches]


def gradients(cfg: AmpConfig, model: nn.Module, window: Any, scaler: Any = None) -> torch.Tensor:
    """The gradient after a window, in one piece."""
    off = amp_accum.make_scaler(AmpConfig(precision="fp32"), torch.device("cpu"))
    model.zero_grad()
    cpu = torch.device("cpu")
    step: Any = SimpleNamespace(
        batch=window, mean_shard=len(window[0][1]), mark_backward=lambda: None, log=lambda **values: None
    )
    amp_accum.accumulate_gradients(cfg, model, scaler or off, step, MemoryMeter(cpu))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_without_the_divisor_steps_are_as_many_times_too_long() -> None:
    cfg, model, window = AmpConfig(precision="fp32"), SimpleNN().double(), a_window([4] * 4)
    window = [(x.double(), y) for x, y in window]
    whole = gradients(cfg, model, [tuple(torch.cat(part) for part in zip(*window, strict=True))])
    assert torch.allclose(gradients(cfg, model, window), whole, atol=1e-12)
    with made("no_divisor"):
        assert torch.allclose(gradients(cfg, model, window), 4 * whole, atol=1e-12)
    # and with the usual divisor, a last window of three is three quarters of a step
    short = gradients(cfg, model, window[:3])
    with made("same_divisor"):
        assert torch.allclose(gradients(cfg, model, window[:3]), 0.75 * short, atol=1e-12)


def test_a_step_every_n_batches_leaks_the_last_window_into_the_next_epoch(cache: Path) -> None:
    layer = nn.Linear(1, 1, bias=False)
    added = []
    for _ in range(2):  # epochs of ten microbatches
        for i in range(10):
            layer(torch.ones(1)).backward()
            if (i + 1) % 4 == 0:
                assert layer.weight.grad is not None
                added.append(layer.weight.grad.item())  # so many gradients are in this step
                layer.zero_grad()
    assert added == [4, 4, 6, 4], "two microbatches of the first epoch come a whole epoch late, with too long a step"
    images = loader.Images(prepare_digits(cache), "train", limit=105)
    windows = loader.Loader(images, 10, 0, torch.device("cpu"), torch.float32, microbatches=4)
    assert [[len(window) for window in windows] for _ in range(2)] == [[4, 4, 2]] * 2
    assert windows.steps == 3 and windows.count_samples(5) == 100 + 80


def test_without_zero_grad_steps_grow_and_one_overflow_ends_the_training() -> None:
    def steps(precision: Any, zero_grad: bool, overflow: int = 0) -> list[float]:
        """The lengths of six steps where every gradient is 1; that of step number `overflow` is infinite."""
        cfg, cpu = AmpConfig(precision=precision, init_scale=1024), torch.device("cpu")
        layer, found = nn.Linear(1, 1, bias=False), []
        optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1), amp_accum.make_scaler(cfg, cpu)
        for number in range(1, 7):
            before = layer.weight.item()
            if zero_grad:
                optimizer.zero_grad()
            with amp_accum.make_autocast(cfg, cpu):
                loss = layer(torch.ones(1, 1)).sum()
            scaler.scale(loss * float("inf") if number == overflow else loss).backward()
            amp_accum.update_weights(cfg, layer, optimizer, scaler)
            found.append(before - layer.weight.item())
        return found

    ones = pytest.approx([1] * 6, abs=1e-2)
    assert steps("bf16", zero_grad=True) == ones and steps("fp16", zero_grad=True) == ones
    assert steps("bf16", zero_grad=False) == pytest.approx([1, 2, 3, 4, 5, 6], abs=1e-2)
    assert steps("fp16", zero_grad=False) == ones, "what is left of the old gradients is unscaled once more"
    assert steps("fp16", zero_grad=True, overflow=3) == pytest.approx([1, 1, 0, 1, 1, 1], abs=1e-2)
    assert steps("fp16", zero_grad=False, overflow=3) == pytest.approx([1, 1, 0, 0, 0, 0], abs=1e-2), "inf stays"


def test_clipping_before_unscaling_clips_the_scale() -> None:
    cfg = AmpConfig(precision="fp16", clip=0.01)

    def moved() -> float:
        """The length of a plain step with rate 1."""
        torch.manual_seed(0)
        model = SimpleNN()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1), amp_accum.make_scaler(cfg, torch.device("cpu"))
        gradients(cfg, model, a_window([8]), scaler)
        amp_accum.update_weights(cfg, model, optimizer, scaler)
        return float((torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm())

    assert moved() == pytest.approx(0.01, rel=1e-3)
    with made("clip_before_unscale"):
        assert moved() < 1e-6


def test_bf16_needs_no_scaler_and_loses_steps_with_one() -> None:
    assert torch.finfo(torch.bfloat16).max > 1e38 and torch.tensor(1e-30).bfloat16() > 0
    assert torch.tensor(1e-8).half() == 0 and torch.tensor(1e5).half().isinf(), "fp16 needs one"
    cfg = AmpConfig(precision="bf16", growth_interval=1)

    def lost() -> int:
        """Steps of 200 that are left out."""
        torch.manual_seed(0)
        model, window = SimpleNN(), [(100 * x, y) for x, y in a_window([8])]
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0), amp_accum.make_scaler(cfg, torch.device("cpu"))
        count = 0
        for _ in range(200):
            gradients(cfg, model, window, scaler)
            count += amp_accum.update_weights(cfg, model, optimizer, scaler)
        return count

    assert lost() == 0
    with made("scaler_for_bf16"):
        assert lost() > 10, "the scale grows until it is too large even for float32"


def test_the_old_spelling_switches_itself_off_without_a_gpu() -> None:
    cpu, cfg = torch.device("cpu"), AmpConfig(precision="fp16")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        right = amp_accum.make_scaler(cfg, cpu)
        with amp_accum.make_autocast(cfg, cpu):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float16
    assert right.is_enabled() and not told
    with made("old_spelling"), pytest.warns(FutureWarning, match=r"torch\.amp\.GradScaler"):
        old = amp_accum.make_scaler(cfg, cpu)
    with pytest.warns(FutureWarning, match=r"torch\.amp\.autocast"), torch.cuda.amp.autocast():
        found = nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    if not torch.cuda.is_available():
        assert not old.is_enabled()
    assert found == torch.float32, "on a CPU nothing is computed in fewer bits"


def test_fused_sgd_makes_momentum_of_what_lies_in_memory_where_its_first_step_is_left_out() -> None:
    def momentum(optimizer: torch.optim.Optimizer, layer: nn.Linear) -> float:
        """The largest after a first step with an infinite gradient."""
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        scaler.unscale_(optimizer)
        junk = [torch.full_like(layer.weight, 7.0) for _ in range(50)]
        del junk  # what others left
        scaler.step(optimizer)
        assert layer.weight.isfinite().all(), "the step itself is left out"
        return float(optimizer.state[layer.weight]["momentum_buffer"].abs().nan_to_num(nan=1e9).max())

    def layers() -> Iterator[nn.Linear]:
        return (nn.Linear(784, 100) for _ in range(10))

    torchs = [momentum(torch.optim.SGD(la.parameters(), lr=1, momentum=0.9, fused=True), la) for la in layers()]
    assert max(torchs) > 0
    assert [momentum(optimizers.build_optimizer(la.parameters(), Optim(), scaled=True), la) for la in layers()] == [
        0
    ] * 10
