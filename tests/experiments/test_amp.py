"""Accumulation changes nothing, in float64 to 1e-9; fewer bits change little; what is infinite is left out by all."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from common.config import config
from common.models import networks
from common.system.errors import UserError
from common.training import optimizers
from configs.amp_accum import Config
from configs.shared import Optim
from experiments import amp_accum
from tests.harness.amp_parity import PLANTS, expected
from tests.harness.cases import train_cases
from tests.harness.ddp_parity import wrong
from tests.harness.processes import run
from tests.harness.shared import make_once

EVEN = "data.train_limit=480"  # no rest in an epoch, whatever `accumulate`
RIGHT = ["accumulate=4", "accumulate=4,no_sync=false", f"accumulate=1,{EVEN}", f"accumulate=4,{EVEN}"]
DIVISORS = [f"{mistake},accumulate=4,clip=0" for mistake in ("no_divisor", "same_divisor", "last_window_dropped")]
COUNTED = [f"{word},accumulate=4,steps=5" for word in ("count", "count,no_sync=false", "forward_outside")]
PLANTED = [f"{plant},precision=fp16,steps=6" for plant in PLANTS]
BITS = {bits: f"precision={bits},accumulate=2,steps=60" for bits in ("fp32", "bf16", "fp16")}
CLIPPED = f"clip_before_unscale,{BITS['fp16']}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[int, dict[str, Any]]:
    """Every case, by number of processes."""
    cases = {1: [*RIGHT, *DIVISORS, *BITS.values(), CLIPPED], 2: [*RIGHT, *COUNTED, *PLANTED]}

    def train(folder: Path) -> None:
        for count, wanted in cases.items():
            train_cases("amp_parity", folder, cache, count, wanted)

    folder = make_once(tmp_path_factory, "amp", train)
    return {count: torch.load(folder / f"results-{count}.pt", weights_only=True) for count in cases}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("case", RIGHT)
def test_a_window_equals_one_batch(processes: int, case: str, trained: Any, cache: Path) -> None:
    found, right = trained[processes][case], expected(cache, case.replace(",no_sync=false", ""))
    assert wrong(found, right) == []
    assert len(right["losses"]) == 30
    assert right["losses"][-1] < 0.9 * right["losses"][0], "a model that learns nothing proves nothing"


@pytest.mark.parametrize("processes", [1, 2])
def test_four_small_microbatches_equal_one_large_batch(processes: int, trained: Any) -> None:
    assert wrong(trained[processes][RIGHT[3]], trained[processes][RIGHT[2]]) == []


@pytest.mark.parametrize("case", DIVISORS)
def test_the_comparison_sees_wrong_windows(case: str, trained: Any, cache: Path) -> None:
    found = wrong(trained[1][case], expected(cache, "accumulate=4,clip=0"))
    assert any("losses" in difference for difference in found) and any("weight" in difference for difference in found)


def test_samples_of_a_short_window_are_counted_as_they_are(trained: Any) -> None:
    found = trained[2]["accumulate=4"]["samples"]
    assert found[19:22] == [480, 498, 522], "the last window of the first epoch has three microbatches of 6"


def test_gradients_are_exchanged_once_a_window(trained: Any) -> None:
    once, each, outside = (trained[2][case] for case in COUNTED)
    held = 8 * sum(p.numel() for p in networks.SimpleNN().parameters())
    assert once["exchanged"] == 5 * held == sum(once["bytes_sent"]), "of two processes each sends all it holds"
    assert once["sent_before_meter"] == held, "the memory that DDP's buckets take is not that of a step"
    assert each["exchanged"] == 20 * held == sum(each["bytes_sent"])
    assert outside["exchanged"] == 20 * held, "with the forward outside no_sync nothing is saved"
    assert outside["losses"] == pytest.approx(once["losses"], abs=1e-9, rel=0), "the result is right: nothing tells"


@pytest.mark.parametrize("bits", ["bf16", "fp16"])
def test_fewer_bits_learn_the_same(bits: str, trained: Any) -> None:
    def final(case: str) -> float:
        assert len(trained[1][case]["losses"]) == 60
        return mean(trained[1][case]["losses"][-20:])

    exact = final(BITS["fp32"])
    assert exact < 0.75 * trained[1][BITS["fp32"]]["losses"][0]
    assert trained[1][BITS[bits]]["losses"] != trained[1][BITS["fp32"]]["losses"]
    assert final(BITS[bits]) == pytest.approx(exact, rel=0.02)
    assert final(CLIPPED) > 1.3 * exact, "clipped before it is unscaled, a gradient is 65536 times too short"


@pytest.mark.parametrize("case", PLANTED)
def test_what_is_infinite_on_one_process_is_left_out_by_all(case: str, trained: Any) -> None:
    found = trained[2][case]
    assert found["skipped"] == [0, 0, 1, 0, 0, 0] and found["scale"] == 32768
    assert found["moved"] == [True, False, True, True, True]
    assert len(set(found["sums"])) == 1, "processes hold different models"
    assert [math.isfinite(loss) for loss in found["losses"]].count(False) == ("nan_loss" in case)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_first_step_that_is_left_out_leaves_nothing_behind(name: Any) -> None:
    """torch's fused SGD makes its momentum in the first step, also where that is left out, of memory as it is."""

    def trained_on(gradients: list[float], scaled: bool) -> Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(784, 100)
        optimizer = optimizers.build_optimizer(layer.parameters(), Optim(name=name, lr=0.1), scaled=scaled)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for gradient in gradients:
            layer.weight.grad, layer.bias.grad = (torch.full_like(p, gradient) for p in layer.parameters())
            scaler.scale(torch.zeros(()))
            layer.weight.grad *= scaler.get_scale()
            layer.bias.grad *= scaler.get_scale()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return layer.weight.detach()

    assert torch.equal(trained_on([math.inf, 1.0, 2.0], True), trained_on([1.0, 2.0], False))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["batch=30"], ["batch=30", "accumulate=4", "2 ranks", "batch=24 or 32"]),
        (["batch=4"], ["use batch=8"]),
        (["dtype=float64"], ["cannot be combined with precision=bf16", "precision=fp32"]),
        (["model=mlp", "channels_last=true"], ["requires convolutions"]),
        (["precision=int8"], ["fp32", "tf32", "bf16", "fp16"]),
    ],
)
def test_settings_of_accumulation_that_do_not_fit_are_refused(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load_config(Config, words)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_tf32_on_a_cpu_is_fp32_and_says_so(tmp_path: Path, digits: tuple[str, ...]) -> None:
    quick = (*digits, "model=mlp", "steps=10", "launch.device=cpu", "processes_per_node=1")
    done = {bits: run("amp_accum", *quick, f"precision={bits}", runs=tmp_path / bits) for bits in ("fp32", "tf32")}
    assert all(each.status == 0 for each in done.values())
    assert done["tf32"].losses == done["fp32"].losses and done["tf32"].result["computed_in"] == "fp32"
    assert "precision=tf32 needs an NVIDIA GPU" in done["tf32"].out and "NVIDIA" not in done["fp32"].out


def test_the_test_loss_is_summed_up_in_float32(tmp_path: Path, digits: tuple[str, ...]) -> None:
    quick = (*digits, "model=mlp", "steps=10", "launch.device=cpu", "processes_per_node=1", "precision=bf16")
    done = run("amp_accum", *quick, "eval_batch=1000", runs=tmp_path)
    assert done.status == 0, done.err
    total = 1000 * done.result["test_loss"]
    assert total > 256 and abs(total - round(total)) > 1e-3, "from 256 on a sum in bf16 is a whole number"


def test_gradients_that_always_overflow_end_the_run(tmp_path: Path, digits: tuple[str, ...]) -> None:
    quick = (*digits, "model=mlp", "steps=900", "optim.lr=100", "optim.warmup=0", "precision=fp16")
    done = run("amp_accum", *quick, runs=tmp_path)
    assert done.status == 2 and "Traceback" not in done.err
    assert "gradients overflow fp16 at every loss scale" in done.err and "precision=bf16" in done.err


def test_channels_last_lays_images_and_filters_so() -> None:
    cpu = torch.device("cpu")
    for wanted in (True, False):
        cfg = Config(model="resnet18", channels_last=wanted)
        run = cast(Any, SimpleNamespace(sample_shape=(3, 8, 8), classes=2, device=cpu, dtype=torch.float32))
        filters = cast(torch.nn.Conv2d, amp_accum.build_model(cfg, run).get_submodule("layer1_0.conv1"))
        for tensor in (filters.weight, amp_accum.compute_outputs(cfg, torch.nn.Identity(), torch.zeros(2, 3, 8, 8))):
            assert tensor.is_contiguous(memory_format=torch.channels_last) == wanted


def test_the_sweep_of_precisions_sets_costs_and_distances_side_by_side(tmp_path: Path, cache: Path) -> None:
    quick = ("data.name=digits", f"data.cache={cache}", "model=mlp", "data.test_limit=100", "steps=3", "repeats=1")
    done = run("amp_accum", *quick, "sweep=true", "accumulate=2", "launch.threads=1", runs=tmp_path, timeout=240)
    assert done.status == 0, done.err
    (folder,) = (tmp_path / "sweeps").iterdir()
    with open(folder / "table.csv") as file:
        found = {tuple(row[key] for key in ("precision", "accumulate", "no_sync")): row for row in csv.DictReader(file)}
    windows = [("1", "True"), ("2", "True"), ("2", "False")]
    assert list(found) == [(bits, *window) for bits in ("fp32", "bf16", "fp16") for window in windows]
    sent = {key: float(row["bytes_sent"]) for key, row in found.items()}
    assert sent[("fp32", "2", "False")] == 2 * sent[("fp32", "2", "True")] == 2 * sent[("bf16", "1", "True")] > 0
    assert all(float(row["samples_per_second"]) > 0 and float(row["training_bytes"]) > 0 for row in found.values())
    assert "loss (vs. fp32)" in done.out and len(list(folder.glob("*.png"))) == 2


def test_compiling_without_a_compiler_is_refused(tmp_path: Path, digits: tuple[str, ...]) -> None:
    done = run("amp_accum", *digits, "compile=true", runs=tmp_path / "runs", PATH=str(tmp_path))
    assert done.status == 2 and "compile=true needs a C++ compiler" in done.err and "Traceback" not in done.err
