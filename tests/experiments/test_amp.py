"""Accumulation changes nothing, in float64 to 1e-9; lower precision changes little; all ranks skip overflows."""

from __future__ import annotations

import csv
import itertools
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
from common.training import optimizers
from configs.amp_accum import Config
from configs.shared import Optim
from experiments import amp_accum
from slurm.launch import experiment_sweep
from slurm.launch.sweep_file import load_grid
from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.environment.shared_results import create_folder_once
from tests.harness.parity.amp_cases import AMP, INFINITE_VALUES
from tests.harness.parity.driver import load_outcomes, train_cases
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import list_differences, list_loss_differences

EVEN = "data.train_limit=480"  # every window of an epoch is complete
RIGHT = ["accumulate=4", "accumulate=4,no_sync=false", f"accumulate=1,{EVEN}", f"accumulate=4,{EVEN}"]
DIVISORS = [f"{mistake},accumulate=4,clip=0" for mistake in ("no_divisor", "same_divisor", "last_window_dropped")]
COUNTED = [f"{case},accumulate=4,steps=5" for case in ("count", "count,no_sync=false", "forward_outside")]
PLANTED = [f"{value},precision=fp16,steps=6" for value in INFINITE_VALUES]
BITS = {bits: f"precision={bits},accumulate=2,steps=60" for bits in ("fp32", "bf16", "fp16")}
CLIPPED = f"clip_before_unscale,{BITS['fp16']}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[int, dict[str, Any]]:
    """The results of every case, by number of processes."""
    cases = {1: [*RIGHT, *DIVISORS, *BITS.values(), CLIPPED], 2: [*RIGHT, *COUNTED, *PLANTED]}

    def train(folder: Path) -> None:
        for count, names in cases.items():
            train_cases(AMP, folder, cache, count, names)

    folder = create_folder_once(tmp_path_factory, "amp", train)
    return {count: load_outcomes(folder, count) for count in cases}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("case", RIGHT)
def test_a_window_equals_one_batch(processes: int, case: str, trained: Any, cache: Path) -> None:
    reference_run = run_reference(AMP, cache, case.replace(",no_sync=false", ""))
    assert list_differences(trained[processes][case], reference_run) == []
    losses = reference_run["losses"]
    assert len(losses) == 30
    assert losses[-1] < 0.9 * losses[0], "without progress the comparison proves nothing"


@pytest.mark.parametrize("processes", [1, 2])
def test_four_small_microbatches_equal_one_large_batch(processes: int, trained: Any) -> None:
    assert list_differences(trained[processes][RIGHT[3]], trained[processes][RIGHT[2]]) == []


@pytest.mark.parametrize("case", DIVISORS)
def test_the_comparison_detects_wrong_windows(case: str, trained: Any, cache: Path) -> None:
    reference_run = run_reference(AMP, cache, "accumulate=4,clip=0")
    assert list_loss_differences(trained[1][case], reference_run)
    assert any("weight" in difference for difference in list_differences(trained[1][case], reference_run))


def read_column(outcome: dict[str, Any], name: str) -> list[Any]:
    """Return a value that metrics.jsonl contains for each step."""
    return [row[name] for row in outcome["rows"] if "loss" in row]


def test_the_samples_of_a_short_window_are_counted(trained: Any) -> None:
    counts = read_column(trained[2]["accumulate=4"], "samples")
    assert counts[19:22] == [480, 498, 522], "the last window of the first epoch has three microbatches of 6"


def test_gradients_are_exchanged_once_a_window(trained: Any) -> None:
    per_window, per_microbatch, forward_outside = (trained[2][case] for case in COUNTED)
    gradient_bytes = 8 * sum(p.numel() for p in networks.SimpleNN().parameters())
    assert per_window["exchanged"] == 5 * gradient_bytes
    assert sum(read_column(per_window, "bytes_sent")) == 5 * gradient_bytes, "each of two ranks sends all its gradients"
    assert per_window["sent_before_meter"] == gradient_bytes, "the creation of DDP is not counted as a step"
    assert per_microbatch["exchanged"] == 20 * gradient_bytes
    assert sum(read_column(per_microbatch, "bytes_sent")) == 20 * gradient_bytes
    assert forward_outside["exchanged"] == 20 * gradient_bytes, "a forward outside no_sync saves nothing"
    # the losses are correct, so only the bytes show the mistake
    assert forward_outside["losses"] == pytest.approx(per_window["losses"], abs=1e-9, rel=0)


@pytest.mark.parametrize("bits", ["bf16", "fp16"])
def test_lower_precision_learns_the_same(bits: str, trained: Any) -> None:
    def compute_final_loss(case: str) -> float:
        losses = trained[1][case]["losses"]
        assert len(losses) == 60
        return mean(losses[-20:])

    exact_losses = trained[1][BITS["fp32"]]["losses"]
    final_loss = compute_final_loss(BITS["fp32"])
    assert final_loss < 0.75 * exact_losses[0]
    assert trained[1][BITS[bits]]["losses"] != exact_losses
    assert compute_final_loss(BITS[bits]) == pytest.approx(final_loss, rel=0.02)
    # clipped before unscaling, a gradient is 65536 times too short
    assert compute_final_loss(CLIPPED) > 1.3 * final_loss


@pytest.mark.parametrize("case", PLANTED)
def test_all_ranks_skip_the_step_if_one_rank_overflows(case: str, trained: Any) -> None:
    outcome = trained[2][case]
    assert read_column(outcome, "skipped") == [0, 0, 1, 0, 0, 0]
    assert outcome["scale"] == 32768
    assert outcome["moved"] == [True, False, True, True, True]
    assert outcome["differing_ranks"] == [], "the ranks have different models"
    assert [math.isfinite(loss) for loss in outcome["losses"]].count(False) == ("nan_loss" in case)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_skipped_first_step_leaves_no_optimizer_state(name: Any) -> None:
    """Fused SGD of torch creates its momentum in the first step, from uninitialised memory if the step is skipped."""

    def train_layer(gradients: list[float], scaled: bool) -> Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(784, 100)
        optimizer = optimizers.build_optimizer(layer.parameters(), Optim(name=name, lr=0.1), scaled=scaled)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for gradient in gradients:
            scaler.scale(torch.zeros(()))
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, gradient) * scaler.get_scale()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return layer.weight.detach()

    after_overflow = train_layer([math.inf, 1.0, 2.0], scaled=True)
    assert torch.equal(after_overflow, train_layer([1.0, 2.0], scaled=False))


INVALID_SETTINGS = {
    "batch=30": "batch=30 ... accumulate=4 ... 2 ranks ... batch=24 or 32",
    "batch=4": "use batch=8",
    "dtype=float64": "cannot be combined with precision=bf16 ... precision=fp32",
    "model=mlp channels_last=true": "requires convolutions",
    "precision=int8": "fp32 ... tf32 ... bf16 ... fp16",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_of_accumulation_are_refused(settings: str, message: str) -> None:
    with expect_refusal(message):
        config.load_config(Config, settings.split())


def test_tf32_on_a_cpu_is_reported_as_fp32(tmp_path: Path, digits: Settings) -> None:
    quick = (*digits, "model=mlp", "steps=10", "launch.device=cpu", "processes_per_node=1")
    fp32 = run_experiment("amp_accum", *quick, "precision=fp32", runs=tmp_path / "fp32")
    tf32 = run_experiment("amp_accum", *quick, "precision=tf32", runs=tmp_path / "tf32")
    assert tf32.losses == fp32.losses
    assert tf32.result["computed_in"] == "fp32"
    assert "precision=tf32 needs an NVIDIA GPU" in tf32.stdout
    assert "NVIDIA" not in fp32.stdout


def test_the_test_loss_is_summed_in_float32(tmp_path: Path, digits: Settings) -> None:
    quick = (*digits, "model=mlp", "steps=10", "launch.device=cpu", "processes_per_node=1", "precision=bf16")
    completed = run_experiment("amp_accum", *quick, "eval_batch=1000", runs=tmp_path)
    total = 1000 * completed.result["test_loss"]
    assert total > 256
    assert abs(total - round(total)) > 1e-3, "a sum above 256 in bf16 is an integer"


def test_gradients_that_always_overflow_stop_the_run(tmp_path: Path, digits: Settings) -> None:
    quick = (*digits, "model=mlp", "steps=900", "launch.device=cpu", "precision=fp16")
    completed = run_experiment("amp_accum", *quick, "optim.lr=100", "optim.warmup=0", runs=tmp_path, status=2)
    is_reported_as_slow = "precision=fp16 can be slow" in completed.stdout
    assert is_reported_as_slow is not torch.cpu._is_amx_fp16_supported()
    assert "gradients overflow fp16 at every loss scale" in completed.stderr
    assert "precision=bf16" in completed.stderr


@pytest.mark.parametrize("channels_last", [True, False])
def test_images_and_filters_have_the_requested_memory_format(channels_last: bool) -> None:
    cfg = Config(model="resnet18", channels_last=channels_last)
    cpu = torch.device("cpu")
    run = cast(Any, SimpleNamespace(sample_shape=(3, 8, 8), outputs=2, device=cpu, dtype=torch.float32))
    filters = cast(torch.nn.Conv2d, amp_accum.build_model(cfg, run).get_submodule("layer1_0.conv1"))
    images = amp_accum.compute_outputs(cfg, torch.nn.Identity(), torch.zeros(2, 3, 8, 8))
    assert filters.weight.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert images.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.drawn
@pytest.mark.slow
def test_the_sweep_of_precisions_compares_costs_and_losses(tmp_path: Path, cache: Path) -> None:
    quick = ("data.name=digits", f"data.cache={cache}", "model=mlp", "data.test_limit=100", "steps=3", "repeats=1")
    completed = run_experiment(
        "amp_accum", *quick, "sweep=true", "accumulate=2", "launch.threads=1", runs=tmp_path, timeout=240
    )
    (folder,) = (tmp_path / "sweeps").iterdir()
    with open(folder / "table.csv") as file:
        rows = list(csv.DictReader(file))
    cells = [(row["precision"], row["accumulate"], row["no_sync"]) for row in rows]
    windows = [("1", "True"), ("2", "True"), ("2", "False")]
    assert cells == [(bits, *window) for bits, window in itertools.product(("fp32", "bf16", "fp16"), windows)]
    for row in rows:
        assert float(row["samples_per_second"]) > 0
        assert float(row["training_bytes"]) > 0
    sent_bytes = {cell: float(row["bytes_sent"]) for cell, row in zip(cells, rows, strict=True)}
    per_window = sent_bytes["fp32", "2", "True"]
    assert per_window > 0
    assert sent_bytes["bf16", "1", "True"] == per_window
    assert sent_bytes["fp32", "2", "False"] == 2 * per_window
    assert "loss (vs. fp32)" in completed.stdout
    assert len(list(folder.glob("*.png"))) == 2


@pytest.mark.parametrize(
    "settings, precisions, no_sync_choices",
    [
        ("", {"fp32", "tf32", "bf16", "fp16"}, {True, False}),
        ("shards=auto", {"fp32", "tf32", "bf16", "fp16"}, {True}),
        ("dtype=float64 precision=fp32", {"fp32", "tf32"}, {True, False}),
    ],
)
def test_the_sweep_omits_refused_points(settings: str, precisions: set[str], no_sync_choices: set[bool]) -> None:
    arguments = [*settings.split(), "sweep=true", "repeats=1"]
    cfg = config.load_config(Config, arguments, {})
    points = experiment_sweep.plan_points(load_grid("amp_accum"), "amp_accum", cfg, arguments, gpus=2)
    assert {point.values["precision"] for point in points} == precisions
    assert {point.values["no_sync"] for point in points} == no_sync_choices


def test_compiling_without_a_compiler_is_refused(tmp_path: Path, digits: Settings) -> None:
    completed = run_experiment(
        "amp_accum", *digits, "compile=true", runs=tmp_path / "runs", PATH=str(tmp_path), status=2
    )
    assert "compile=true needs a C++ compiler" in completed.stderr
