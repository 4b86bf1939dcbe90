"""The mistakes of common tutorials: what they really do, and the right line beside each."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

from common import data, schedules, splits
from common.evaluate import batches
from common.footprint import Footprint
from common.models import SimpleNN
from common.prepare import prepare_digits
from configs.amp_accum import Config as AmpConfig
from experiments import amp_accum
from tests.amp_parity import script
from tests.ddp_pitfalls import SECONDS
from tests.helpers import ROOT, environment, run


def tutorial_stages() -> list[nn.Module]:
    """A familiar split: each half is built on its own, with its layers but without what stood between them."""
    return [nn.Sequential(nn.Linear(784, 128)), nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 10))]


def chain(stages: list[Any], x: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        x = stage(x)
    return x


def test_split_without_flatten_does_not_take_images() -> None:
    images = torch.randn(4, 28, 28)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        chain(tutorial_stages(), images)
    model = SimpleNN()
    assert torch.equal(chain(splits.cut(model, ["fc2"]), images), model(images))


def test_split_without_relu_is_one_linear_layer() -> None:
    a, b, zero = torch.randn(4, 784), torch.randn(4, 784), torch.zeros(4, 784)

    def gap(f: Any) -> Any:
        """0 for an affine function: f(a + b) + f(0) = f(a) + f(b)."""
        return (f(a + b) + f(zero) - f(a) - f(b)).abs().max().item()

    stages = tutorial_stages()
    assert gap(lambda x: chain(stages, x)) < 1e-5
    right = splits.cut(SimpleNN(), ["fc2"])
    assert gap(lambda x: chain(right, x.view(-1, 28, 28))) > 1e-2


def test_halves_of_two_models_are_neither_of_them() -> None:
    images = torch.randn(4, 28, 28)
    one, two = SimpleNN(), SimpleNN()
    mixed = [splits.cut(one, ["fc2"])[0], splits.cut(two, ["fc2"])[1]]
    for model in (one, two):
        assert not torch.allclose(chain(mixed, images), model(images))
        assert torch.equal(chain(splits.cut(model, ["fc2"]), images), model(images))


def overlap(timeline: list[dict[str, Any]]) -> float:
    """Seconds of one step in which both processes compute."""
    spans = [[(s["start"], s["end"]) for s in timeline if s["process"] == p] for p in (0, 1)]
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans[0] for c, d in spans[1])


def test_moving_tensors_from_stage_to_stage_is_no_pipeline(tmp_path: Path, digits: tuple[str, ...]) -> None:
    def measured(schedule: str, attempt: int) -> float:
        """The share of all computing in which both processes compute."""
        wide = (*digits, "width=512", "batch=256", f"schedule={schedule}")
        done = run("mnist_pipeline", *wide, runs=tmp_path / f"{schedule}-{attempt}")
        assert done.status == 0, done.err
        timeline = done.folder.result["timeline"]
        return overlap(timeline) / sum(span["end"] - span["start"] for span in timeline)

    assert measured("naive", 0) < 0.01
    # with one processor to share, even a pipeline's stages take turns: a busy machine gets another chance
    assert any(measured("gpipe", attempt) > 0.01 for attempt in range(4))
    for stages in (2, 4, 8):
        assert schedules.idle_share(schedules.play(schedules.naive(stages, stages, 4), stages)) == 1 - 1 / stages


def test_mean_of_batch_means_is_not_the_mean_over_samples() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(100, 10), torch.randint(10, (100,))
    logits[-4:] *= 10  # the ragged last batch is a hard one
    pieces = list(batches(100, 32))
    assert [piece.stop - piece.start for piece in pieces] == [32, 32, 32, 4]
    means = [F.cross_entropy(logits[p], labels[p]) for p in pieces]
    sums = [F.cross_entropy(logits[p], labels[p], reduction="sum") for p in pieces]
    exact = F.cross_entropy(logits, labels).item()
    assert sum(sums).item() / 100 == pytest.approx(exact, rel=1e-5)  # type: ignore[union-attr]
    assert sum(means).item() / len(means) > exact * 1.5  # type: ignore[union-attr]


def made(*names: str) -> dict[str, Any]:
    """What two processes find when they make mistakes of tests/ddp_pitfalls.py."""
    words = [sys.executable, "-m", "tests.ddp_pitfalls", *names]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def mistakes() -> dict[str, Any]:
    """All of them, in one launch. Ranks in a loop come last: they leave their process half in a group."""
    names = ["group_in_a_function_that_returns", "barrier_on_one_rank", "several_devices", "model_parallelism"]
    return made(*names, "ranks_in_a_loop")


def test_ranks_in_a_loop_wait_for_ever(mistakes: dict[str, Any]) -> None:
    found = mistakes["ranks_in_a_loop"]
    assert found["began"] == [0], "rank 1 is never reached: rank 0 waits for it"
    assert found["loop"]["seconds"] >= SECONDS
    assert found["together"] == [2, 2]


def test_a_group_does_not_outlive_the_processes_that_made_it(mistakes: dict[str, Any]) -> None:
    found = mistakes["group_in_a_function_that_returns"]
    assert found["inside"] == [True, True] and found["after"] is False
    assert "process group has not been initialized" in found["use"]["error"]


def test_a_barrier_on_one_rank_hangs_both(mistakes: dict[str, Any]) -> None:
    found = mistakes["barrier_on_one_rank"]
    assert all("error" in answer for answer in found["one"])
    assert max(answer["seconds"] for answer in found["one"]) >= SECONDS
    assert found["all"] == [2.0, 2.0]


def test_a_ddp_process_has_one_device(mistakes: dict[str, Any]) -> None:
    for wrong, right in mistakes["several_devices"]:
        assert "device_ids" in wrong["error"]
        assert right == "DistributedDataParallel"


def test_ddp_does_not_split_the_model(mistakes: dict[str, Any]) -> None:
    whole = sum(parameter.numel() for parameter in SimpleNN().parameters())
    for ddp, fsdp in mistakes["model_parallelism"]:
        assert ddp == whole
        assert 0.45 * whole < fsdp < 0.55 * whole


def test_without_set_epoch_every_epoch_has_the_same_order(cache: Path) -> None:
    sampler: Any = DistributedSampler(range(100), num_replicas=2, rank=0, shuffle=True)  # type: ignore[arg-type]
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    images = data.Images(prepare_digits(cache), "train", limit=100)
    loader = data.Loader(images, 10, 0, torch.device("cpu"), torch.float32, share=(0, 2))
    epochs = [[label for _, y in loader for label in y.tolist()] for _ in range(2)]
    assert epochs[0] != epochs[1], "the order follows from the epoch, and nobody has to say which one it is"


# ---- accumulation and mixed precision: the mistakes are made in the script itself, by tests/amp_parity.py


def a_window(batches: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, 28, 28), torch.randint(10, (n,))) for n in batches]


def gradients(it: Any, cfg: AmpConfig, model: nn.Module, window: Any, scaler: Any = None) -> torch.Tensor:
    """The gradient after a window, in one piece."""
    off = it.make_scaler(AmpConfig(precision="fp32"), torch.device("cpu"))
    model.zero_grad()
    it.add_up(cfg, model, scaler or off, window, Footprint(torch.device("cpu")))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_without_the_divisor_steps_are_as_many_times_too_long() -> None:
    cfg, model, window = AmpConfig(precision="fp32"), SimpleNN().double(), a_window([4] * 4)
    window = [(x.double(), y) for x, y in window]
    whole = gradients(amp_accum, cfg, model, [tuple(torch.cat(part) for part in zip(*window, strict=True))])
    assert torch.allclose(gradients(amp_accum, cfg, model, window), whole, atol=1e-12)
    assert torch.allclose(gradients(script("no_divisor"), cfg, model, window), 4 * whole, atol=1e-12)
    # and with the usual divisor, a last window of three is three quarters of a step
    short = gradients(amp_accum, cfg, model, window[:3])
    assert torch.allclose(gradients(script("same_divisor"), cfg, model, window[:3]), 0.75 * short, atol=1e-12)


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
    images = data.Images(prepare_digits(cache), "train", limit=105)
    windows = data.Windows(data.Loader(images, 10, 0, torch.device("cpu"), torch.float32), 4)
    assert [[len(window) for window in windows] for _ in range(2)] == [[4, 4, 2]] * 2
    assert windows.steps == 3 and windows.samples(5) == 100 + 80


def test_clipping_before_unscaling_clips_the_scale() -> None:
    cfg = AmpConfig(precision="fp16", clip=0.01)

    def moved(it: Any) -> float:
        """The length of a plain step with rate 1."""
        torch.manual_seed(0)
        model = SimpleNN()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1), it.make_scaler(cfg, torch.device("cpu"))
        gradients(it, cfg, model, a_window([8]), scaler)
        it.update(cfg, model, optimizer, scaler)
        return float((torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm())

    assert moved(amp_accum) == pytest.approx(0.01, rel=1e-3)
    assert moved(script("clip_before_unscale")) < 1e-6


def test_a_forward_outside_no_sync_exchanges_gradients_all_the_same(tmp_path: Path, cache: Path) -> None:
    cases = [f"{word},model=mlp,accumulate=4,steps=3" for word in ("count", "forward_outside")]
    words = [sys.executable, "-m", "tests.amp_parity", str(tmp_path / "out.pt"), str(cache), "2", *cases]
    subprocess.run(words, cwd=ROOT, env=environment(), check=True, capture_output=True)
    inside, outside = torch.load(tmp_path / "out.pt", weights_only=True).values()
    assert outside["exchanged"] == 4 * inside["exchanged"] > 0
    assert outside["losses"] == pytest.approx(inside["losses"], rel=1e-5), "the result is right: nothing tells"


def test_bf16_needs_no_scaler_and_loses_steps_with_one() -> None:
    assert torch.finfo(torch.bfloat16).max > 1e38 and torch.tensor(1e-30).bfloat16() > 0
    assert torch.tensor(1e-8).half() == 0 and torch.tensor(1e5).half().isinf(), "fp16 needs one"
    cfg = AmpConfig(precision="bf16", growth_interval=1)

    def lost(it: Any) -> int:
        """Steps of 200 that are left out."""
        torch.manual_seed(0)
        model, window = SimpleNN(), [(100 * x, y) for x, y in a_window([8])]
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0), it.make_scaler(cfg, torch.device("cpu"))
        count = 0
        for _ in range(200):
            gradients(it, cfg, model, window, scaler)
            count += it.update(cfg, model, optimizer, scaler)
        return count

    assert lost(amp_accum) == 0
    assert lost(script("scaler_for_bf16")) > 10, "the scale grows until it is too large even for float32"


def test_the_old_spelling_switches_itself_off_without_a_gpu() -> None:
    cpu, cfg = torch.device("cpu"), AmpConfig(precision="fp16")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        right = amp_accum.make_scaler(cfg, cpu)
        with amp_accum.autocast(cfg, cpu):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float16
    assert right.is_enabled() and not told
    with pytest.warns(FutureWarning, match=r"torch\.amp\.GradScaler"):
        old = script("old_spelling").make_scaler(cfg, cpu)
    with pytest.warns(FutureWarning, match=r"torch\.amp\.autocast"), torch.cuda.amp.autocast():
        found = nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    if not torch.cuda.is_available():
        assert not old.is_enabled()
    assert found == torch.float32, "on a CPU nothing is computed in fewer bits"
