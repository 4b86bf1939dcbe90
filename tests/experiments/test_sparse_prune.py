"""Pruning: masks remove the exact number of weights, pruned weights stay zero, and exported forms work."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoint import storage
from common.config import config
from common.data.prepare import prepare_digits
from common.data.samples import Images
from common.models import networks
from common.system import seeds
from common.system.errors import UserError
from common.techniques.pruning import int8, pruning_masks, pruning_savings, pruning_schedules
from common.techniques.pruning.pruning_masks import Masks
from common.training.evaluate import measure_accuracy
from configs.sparse_prune import CRITERIA, Config
from configs.sweeps.sparse_prune import GRID, describe_csr_speed
from experiments import sparse_prune
from slurm.launch import sweep_file
from tests.harness.commands.processes import FinishedRun, Settings, run_experiment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.environment.randomness import draw_cases

# a run takes half a second; begin=0.1 and end=0.6 are steps 1 and 7 of 12
SMALL = ("model=mlp", "batch=16", "steps=12", "data.test_limit=100", "optim.warmup=0", "launch.threads=1")
QUIET = (*SMALL, "export=false", "int8=false")
SAVING = (*QUIET, "every=2", "checkpoint.every_steps=1", "checkpoint.every_seconds=0", "checkpoint.keep=100")
MLP_WEIGHTS = 784 * 128 + 128 * 64 + 64 * 10
SHAPES = [(8, 1, 3, 3), (30, 50), (10, 30)]
OTHER_SCOPES = [("schedule=rigl",), ("scope=structured",), ("scope=layer", "schedule=iterative")]


def draw_scores(*shapes: tuple[int, ...], levels: int = 0, seed: int = 0) -> list[Tensor]:
    """Draw random scores of these shapes; with `levels`, only that many different values."""
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.rand(shape, generator=generator) for shape in shapes]
    if levels:
        return [(score * levels).floor() for score in scores]
    return scores


def count_pruned(masks: list[Tensor]) -> int:
    return sum(int((~mask).sum()) for mask in masks)


def count_units(mask: Tensor) -> int:
    """Count the output units of a layer that have weights."""
    return int(mask.flatten(1).any(1).sum())


def prune_globally(masks: Masks, cfg: Config, model: nn.Module, step: int, sparsity: float) -> None:
    """Replace the masks by those of the criterion of a config."""
    no_run: Any = None  # these criteria need no run
    scores = sparse_prune.score_weights(cfg, no_run, model, masks, step)
    masks.replace_masks(pruning_masks.make_global_masks(scores, sparsity))


def compute_remaining_shares(masks: Masks) -> list[float]:
    shares = []
    for mask in masks.masks:
        share = mask.float().mean()
        shares.append(share.item())
    return shares


# ---- number of pruned weights


@pytest.mark.parametrize("levels", [0, 1, 3], ids=["all different", "all equal", "three values"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.92, 0.999, 1.0])
def test_the_requested_number_of_weights_is_pruned_despite_ties(share: float, levels: int) -> None:
    scores = draw_scores(*SHAPES, levels=levels)
    total = sum(score.numel() for score in scores)

    masks = pruning_masks.make_global_masks(scores, share)
    assert count_pruned(masks) == round(share * total)
    all_scores = torch.cat([score.flatten() for score in scores])
    mask = torch.cat([mask.flatten() for mask in masks])
    pruned = all_scores[~mask]
    remaining = all_scores[mask]
    if len(pruned) and len(remaining):
        assert pruned.max() <= remaining.min()

    layer_masks = pruning_masks.make_layer_masks(scores, [share] * len(scores))
    assert count_pruned(layer_masks) == round(share * total)
    for score, layer_mask in zip(scores, layer_masks, strict=True):
        exact_count = share * score.numel()
        assert abs(count_pruned([layer_mask]) - exact_count) < 1


@pytest.mark.parametrize("kind", ["random", "sorted", "two values", "misleading sample"])
def test_the_kth_smallest_of_many_numbers_is_exact(kind: str) -> None:
    count = 17 * pruning_masks.SAMPLE_SIZE + 5
    numbers = torch.rand(count)
    if kind == "sorted":
        numbers = numbers.sort().values
    if kind == "two values":
        numbers = (numbers > 0.5).float()
    if kind == "misleading sample":
        numbers[:: count // pruning_masks.SAMPLE_SIZE] = -1.0

    ordered = numbers.sort().values
    end = count // 3
    parts = [numbers[:end].view(1, -1), numbers[end:]]
    for k in (1, 2, count // 10, count // 2, int(0.9 * count), count - 1, count):
        assert pruning_masks.find_kth_smallest(parts, k) == ordered[k - 1], k
        lowest = pruning_masks.select_lowest_scores(parts, k)
        assert sum(int(mask.sum()) for mask in lowest) == k


def test_frozen_weights_are_not_pruned() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert list(Masks(model).layers) == ["1"]


def test_a_weight_that_two_layers_share_has_one_mask() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    masks = Masks(model)
    assert list(masks.layers) == ["0"]
    assert masks.weight_count == 4


def test_pruned_weights_stay_pruned_and_layers_are_normalized_on_request() -> None:
    model = networks.build_network("lenet300", (28, 28), 10)
    masks = Masks(model)
    with torch.no_grad():
        masks.weights[0].mul_(100)
    prune_globally(masks, Config(), model, step=0, sparsity=0.1)
    shares = compute_remaining_shares(masks)
    assert shares[0] > 0.98, "a layer with large weights loses almost none"
    assert shares[1] < 0.3

    before = [mask.clone() for mask in masks.masks]
    cfg = Config(criterion="random")
    prune_globally(masks, cfg, model, step=1, sparsity=0.8)
    assert masks.sparsity == pytest.approx(0.8, abs=1 / masks.weight_count)
    for mask, earlier_mask in zip(masks.masks, before, strict=True):
        returned = mask & ~earlier_mask
        assert not returned.any(), "a pruned weight returned"

    masks.replace_masks([torch.ones_like(mask) for mask in masks.masks])
    cfg = Config(criterion="magnitude", normalize="layer")
    prune_globally(masks, cfg, model, step=0, sparsity=0.5)
    assert compute_remaining_shares(masks) == pytest.approx([0.5] * 3, abs=0.04)


@pytest.mark.parametrize("pattern, shape", [("2:4", (6, 3, 3, 3)), ("1:4", (5, 16)), ("3:8", (4, 50))])
def test_n_of_m_holds_in_every_group(pattern: str, shape: tuple[int, ...]) -> None:
    remaining, size = Config(pattern=pattern).parse_pattern()
    sparsity = 1 - remaining / size
    for levels in (0, 2):
        (score,) = draw_scores(shape, levels=levels)
        (mask,) = pruning_masks.make_group_masks([score], sparsity, size)
        rows = mask.flatten(1)
        end = score[0].numel() // size * size
        groups = rows[:, :end].reshape(-1, size)
        assert (groups.sum(1) == remaining).all()
        assert rows[:, end:].all(), "an incomplete group was pruned"

        score_rows = score.flatten(1)
        group_scores = score_rows[:, :end].reshape(-1, size)
        highest_pruned = group_scores.masked_fill(groups, -1).max(1).values
        lowest_remaining = group_scores.masked_fill(~groups, math.inf).min(1).values
        assert (highest_pruned <= lowest_remaining).all()


def test_whole_channels_are_pruned_and_the_last_layer_is_kept() -> None:
    scores = draw_scores((8, 4, 3, 3), (20, 30), (10, 20))
    scores[0][2] = 0.01
    scores[0][5] = 0.02
    masks = pruning_masks.make_channel_masks(scores, 0.25)
    first_mask = masks[0]
    assert [i for i, channel in enumerate(first_mask) if not channel.any()] == [2, 5]
    for mask in masks:
        for channel in mask:
            assert channel.all() or not channel.any()
    assert count_pruned(masks[1:2]) == 5 * 30
    assert masks[2].all()

    masks = pruning_masks.make_channel_masks(scores, 0.999)
    assert [count_units(mask) for mask in masks] == [1, 1, 10]

    scores[0][1] = 0.0
    scores[0][5] = pruning_masks.PRUNED_SCORE
    first_mask = pruning_masks.make_channel_masks(scores, 1 / 8)[0]
    assert not first_mask[5].any(), "a pruned channel comes before one with a score of 0"
    assert first_mask[1].all()


def test_rigl_starts_with_the_erdos_renyi_distribution() -> None:
    shapes = [torch.Size([300, 784]), torch.Size([100, 300]), torch.Size([10, 100])]
    sparsities = pruning_masks.allocate_erdos_renyi_sparsities(shapes, 0.92)
    assert sparsities[0] > sparsities[1] > sparsities[2] == 0, "the formula makes the last layer more than dense"

    counts = []
    for sparsity, shape in zip(sparsities, shapes, strict=True):
        density = 1 - sparsity
        counts.append(density * shape.numel())
    total = sum(shape.numel() for shape in shapes)
    assert sum(counts) == pytest.approx(0.08 * total)
    # the density is proportional to the sum of the sides divided by their product
    first_ratio = counts[0] / sum(shapes[0])
    second_ratio = counts[1] / sum(shapes[1])
    assert first_ratio == pytest.approx(second_ratio)


def test_rigl_replaces_the_smallest_weights_by_those_with_the_largest_gradients() -> None:
    model = nn.Sequential(nn.Linear(20, 10, bias=False))
    masks = Masks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (weight,) = masks.weights
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(weight.shape, generator=generator)
    masks.replace_masks(pruning_masks.make_layer_masks([scores], [0.5]))
    masks.apply_to_weights()
    gradient = torch.randn(weight.shape, generator=generator)
    weight.grad = gradient
    optimizer.step()
    masks.apply_to_weights()

    before = masks.masks[0].clone()
    weight_before = weight.detach().clone()
    pruning_masks.drop_and_grow(masks, optimizer, 0.3)
    masks.apply_to_weights()

    after = masks.masks[0]
    assert before.sum() == 100
    assert after.sum() == 100
    dropped = before & ~after
    grown = after & ~before
    never_present = ~before & ~after
    kept_and_nonzero = before & after & (weight != 0)
    assert grown.any()
    assert grown.sum() == dropped.sum()

    largest_dropped = weight_before[dropped].abs().max()
    smallest_kept = weight_before[kept_and_nonzero].abs().min()
    assert largest_dropped <= smallest_kept
    smallest_grown = gradient[grown].abs().min()
    assert smallest_grown >= gradient[never_present].abs().max()

    assert (weight[grown] == 0).all()
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert (momentum[grown] == 0).all()
    assert torch.equal(weight[kept_and_nonzero], weight_before[kept_and_nonzero])


# ---- schedules


@pytest.mark.parametrize("schedule", ["oneshot", "iterative", "cubic", "rigl"])
@pytest.mark.parametrize("total", [1, 3, 7, 100, 1000])
def test_every_schedule_ends_at_the_requested_sparsity(schedule: Any, total: int) -> None:
    cfg = Config(schedule=schedule, sparsity=0.9, every=7)
    sparsities: dict[int, float] = {}
    for step in range(total + 1):
        sparsity = pruning_schedules.compute_sparsity(cfg, step, total)
        if sparsity is not None:
            sparsities[step] = sparsity
    ordered = list(sparsities.values())
    assert ordered[-1] == pytest.approx(0.9)
    assert ordered == sorted(ordered)
    assert max(sparsities) <= round(0.6 * total)
    if total == 1000:
        step_counts = {"oneshot": 1, "iterative": 5, "cubic": 72, "rigl": 86}
        assert len(sparsities) == step_counts[schedule]
    if schedule == "cubic" and total == 1000:
        remaining_time = 1 - 70 / 500
        expected = 0.9 * (1 - remaining_time**3)
        assert sparsities[100 + 70] == pytest.approx(expected)


INVALID_SETTINGS = {
    "levels=[0.9,2]": "levels=[0.9,2] ... below 1",
    "criteria=[size]": "criteria=[size] ... magnitude, gradient",
    "scope=n:m": "sparsity=0.92 ... pattern=2:4 ... use sparsity=0.5",
    "pattern=4:2": "pattern=4:2 ... n < m",
    "scope=layer normalize=layer": "normalize=layer ... scope=global",
    "sweep=true schedule=none": "schedule=none ... use another schedule",
    "model=lenet5 data.name=generated data.image_size=8": "data.image_size=8 ... 16 or more",
    "begin=0.7 end=0.6": "begin=0.7 ... end=0.6 ... lower begin",
    "schedule=rigl criterion=taylor": "criterion=taylor ... rigl ... criterion=magnitude",
    "schedule=rigl scope=structured": "scope=structured ... rigl ... scope=layer",
    "batch=63 processes_per_node=2": "batch=63 ... 2 ranks ... batch=62 or 64",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_are_refused(settings: str, message: str) -> None:
    with expect_refusal(message):
        config.load_config(Config, settings.split(), {})


@pytest.mark.parametrize("pattern", ["1:3", "2:4", "3:7", "5:9"])
def test_the_sparsity_recommended_by_the_error_is_accepted(pattern: str) -> None:
    settings = ["scope=n:m", f"pattern={pattern}"]
    with pytest.raises(UserError) as caught:
        config.load_config(Config, settings, {})
    match = re.search("use (.*?) or ", str(caught.value))
    assert match
    recommended = match[1]
    cfg = config.load_config(Config, [*settings, recommended], {})
    remaining, size = cfg.parse_pattern()
    scores = draw_scores((4, 5 * size))
    (mask,) = pruning_masks.make_group_masks(scores, cfg.sparsity, size)
    groups = mask.view(-1, size)
    assert (groups.sum(1) == remaining).all()


# ---- through training


def load_model(checkpoint: storage.CheckpointPath) -> dict[str, Tensor]:
    state = torch.load(checkpoint.path / "rank-0.pt", weights_only=True)
    model: dict[str, Tensor] = state["model"]
    return model


def find_newest_checkpoint(completed: FinishedRun) -> storage.CheckpointPath:
    attempts = completed.folder.list_attempts()
    checkpoints = storage.list_checkpoints(attempts[-1])
    return checkpoints[-1]


def load_models(completed: FinishedRun) -> dict[int, dict[str, Tensor]]:
    """Return the model of each checkpoint, by step."""
    (attempt,) = completed.folder.list_attempts()
    return {checkpoint.step: load_model(checkpoint) for checkpoint in storage.list_checkpoints(attempt)}


def select_masks(model: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: mask for name, mask in model.items() if name.endswith("weight_mask")}


def check_no_unit_is_pruned_in_part(model: dict[str, Tensor]) -> None:
    for mask in select_masks(model).values():
        is_kept = mask.all(1)
        is_pruned = ~mask.any(1)
        assert (is_kept | is_pruned).all()


def resume(killed: FinishedRun, *settings: str) -> FinishedRun:
    """Resume a run as if it had been killed."""
    folder = killed.folder.path
    (folder / "result.json").unlink()
    resumed = run_experiment("sparse_prune", "--resume", str(folder), *settings, runs=folder.parent)
    return resumed


def check_pruned_weights_are_zero(model: dict[str, Tensor], step: int) -> None:
    for name, mask in select_masks(model).items():
        weight = model[name.removesuffix("_mask")]
        assert (weight[~mask] == 0).all(), (step, name)


@pytest.mark.parametrize(
    "settings", [("optim.name=sgd", "optim.weight_decay=0.01"), ("optim.name=adam",), ("l1=0.01",)]
)
def test_pruned_weights_stay_zero_to_the_bit(settings: Settings, digits: Settings, tmp_path: Path) -> None:
    settings = (*digits, *SAVING, "processes_per_node=2", *settings)
    completed = run_experiment("sparse_prune", *settings, runs=tmp_path)
    sparsities = []
    for step, model in load_models(completed).items():
        check_pruned_weights_are_zero(model, step)
        masks = list(select_masks(model).values())
        assert [mask.dtype for mask in masks] == [torch.bool] * 3
        sparsities.append(count_pruned(masks) / MLP_WEIGHTS)
        assert sum(mask.numel() for mask in masks) == MLP_WEIGHTS
    assert len(sparsities) == 12
    assert sparsities[0] == 0
    pruned_count = round(0.92 * MLP_WEIGHTS)
    assert sparsities[-1] == pruned_count / MLP_WEIGHTS
    assert sparsities == sorted(sparsities)
    assert sparsities[6:] == sparsities[-1:] * 6, "masks changed after `end`"
    assert len(set(sparsities)) == 4, "three steps prune"
    assert completed.result["sparsity"] == pytest.approx(sparsities[-1])
    rows = completed.folder.read_metrics()
    recorded = [row["sparsity"] for row in rows if "loss" in row]
    assert recorded == pytest.approx(sparsities)


@pytest.mark.slow
@pytest.mark.parametrize("settings", draw_cases("scopes with a resume", OTHER_SCOPES, 1))
def test_pruned_weights_stay_zero_with_other_scopes_and_after_a_resume(
    settings: Settings, digits: Settings, tmp_path: Path
) -> None:
    is_structured = settings[0] == "scope=structured"
    settings = (*digits, *SAVING, "sparsity=0.9", *settings)
    first = run_experiment("sparse_prune", *settings, runs=tmp_path)
    last_step = max(load_models(first))
    (first_attempt,) = first.folder.list_attempts()
    for checkpoint in storage.list_checkpoints(first_attempt):
        if checkpoint.step > last_step - 5:
            shutil.rmtree(checkpoint.path)

    resumed = resume(first)
    attempts = resumed.folder.list_attempts()
    assert len(attempts) == 2
    for attempt in attempts:
        for checkpoint in storage.list_checkpoints(attempt):
            model = load_model(checkpoint)
            check_pruned_weights_are_zero(model, checkpoint.step)
            if is_structured:
                check_no_unit_is_pruned_in_part(model)

    newest = find_newest_checkpoint(resumed)
    assert newest.step == last_step
    masks = list(select_masks(load_model(newest)).values())
    if is_structured:
        assert [count_units(mask) for mask in masks] == [13, 6, 10]
    else:
        assert sum(mask.numel() for mask in masks) == MLP_WEIGHTS
        assert count_pruned(masks) == round(0.9 * MLP_WEIGHTS)


@pytest.mark.parametrize("schedule", ["oneshot", "rigl"])
def test_a_resume_prunes_what_a_shorter_run_has_pruned_by_then(schedule: str, digits: Settings, tmp_path: Path) -> None:
    """With fewer steps or another schedule, the step that prunes lies before the step of the checkpoint."""
    settings = (*digits, *SAVING, "schedule=oneshot", "begin=0.5", "sparsity=0.9")
    first = run_experiment("sparse_prune", *settings, runs=tmp_path)
    (attempt,) = first.folder.list_attempts()
    for checkpoint in storage.list_checkpoints(attempt):
        if checkpoint.step > 5:  # the masks change after step 6 of 12
            shutil.rmtree(checkpoint.path)
    changes = ["steps=8"] if schedule == "oneshot" else ["schedule=rigl", "begin=0.1"]
    resumed = resume(first, *changes)
    assert resumed.result["sparsity"] == pytest.approx(0.9, abs=1e-4)
    newest = find_newest_checkpoint(resumed)
    check_pruned_weights_are_zero(load_model(newest), newest.step)


def test_a_resume_with_a_lower_sparsity_restores_no_weight(digits: Settings, tmp_path: Path) -> None:
    first = run_experiment("sparse_prune", *digits, *SAVING, "steps=6", runs=tmp_path)
    before = load_models(first)[6]
    resumed = resume(first, "steps=16", "sparsity=0.5")
    newest = find_newest_checkpoint(resumed)
    assert newest.step == 16
    after = load_model(newest)
    masks_before = select_masks(before)
    assert count_pruned(list(masks_before.values())) > 0.5 * MLP_WEIGHTS
    for name, mask in masks_before.items():
        weight = after[name.removesuffix("_mask")]
        assert (weight[~mask] == 0).all()


@pytest.mark.slow
def test_two_of_four_holds_after_fine_tuning(digits: Settings, tmp_path: Path) -> None:
    settings = ("model=lenet5", "scope=n:m", "sparsity=0.5", "steps=6", "batch=8")
    completed = run_experiment("sparse_prune", *digits, *SAVING, *settings, runs=tmp_path)
    for step, model in load_models(completed).items():
        for name in ("conv1", "conv2", "fc1", "fc2"):
            rows = model[f"{name}.weight"].flatten(1)
            mask = model[f"{name}.weight_mask"].flatten(1)
            end = rows.shape[1] // 4 * 4
            groups = mask[:, :end].reshape(-1, 4)
            remaining = groups.sum(1)
            if step >= 4:
                assert (remaining == 2).all(), (step, name)
            assert (rows[~mask] == 0).all()


def test_a_soft_threshold_zeroes_weights_smaller_than_the_step() -> None:
    weight = torch.randn(1000)
    before = weight.clone()
    pruning_masks.soft_threshold([weight], 0.3)
    is_kept = weight != 0
    magnitudes = before.abs()
    assert torch.equal(is_kept, magnitudes > 0.3)
    expected = magnitudes[is_kept] - 0.3
    assert torch.allclose(weight[is_kept].abs(), expected)


@pytest.mark.slow
def test_stronger_l1_makes_more_zeros_without_masks(digits: Settings, tmp_path: Path) -> None:
    counts = []
    for l1 in (0, 0.01, 0.1):
        settings = (*digits, *QUIET, "schedule=none", f"l1={l1}", "steps=20")
        completed = run_experiment("sparse_prune", *settings, runs=tmp_path / str(l1))
        nonzero = completed.result["nonzero"]
        remaining_share = nonzero / MLP_WEIGHTS
        assert completed.result["sparsity"] == pytest.approx(1 - remaining_share)
        counts.append(nonzero)
    without, weak, strong = counts
    assert without == MLP_WEIGHTS
    assert without > 1.005 * weak
    assert 1.005 * weak > 1.1 * strong


def test_networks_for_colour_images_are_pruned(cache: Path, tmp_path: Path) -> None:
    images = ("data.name=generated", f"data.cache={cache}", "data.image_size=16", "data.samples=64")
    settings = ("model=lenet5", "batch=8", "eval_batch=8", "epochs=1", "steps=4", "every=1", "processes_per_node=2")
    completed = run_experiment("sparse_prune", *QUIET, *images, *settings, runs=tmp_path)
    weights = completed.result["weights"]
    convolutions = 20 * 3 * 25 + 50 * 20 * 25
    linear_layers = 500 * 50 + 10 * 500
    assert weights == convolutions + linear_layers
    assert completed.result["nonzero"] == weights - round(0.92 * weights)


# ---- the sweep


POINTS_BY_SETTINGS = {
    "": list(itertools.product((0.8, 0.92, 0.97, 0.99), CRITERIA)),
    "schedule=rigl": [(sparsity, "magnitude") for sparsity in (0.8, 0.92, 0.97, 0.99)],
    "scope=n:m sparsity=0.5 criteria=[taylor]": [(0.5, "taylor")],
}


@pytest.mark.parametrize("settings, points", POINTS_BY_SETTINGS.items())
def test_the_grid_of_a_sweep_follows_the_settings(settings: str, points: list[tuple[float, str]]) -> None:
    cfg = config.load_config(Config, ["sweep=true", *settings.split()], {})
    common = {"export": False, "int8": False}
    dense_cell = common | {"schedule": "none", "l1": 0}
    expected = [dense_cell]
    for sparsity, name in points:
        expected.append(common | {"criterion": name, "sparsity": sparsity})
    assert GRID.points(cfg, 0) == expected


# ---- savings


def build_pruned_lenet(share: float = 0.9) -> nn.Module:
    torch.manual_seed(seeds.derive_seed(0, "init"))
    model = networks.build_network("lenet5", (28, 28), 10)
    masks = Masks(model)
    magnitudes = [weight.abs() for weight in masks.weights]
    masks.replace_masks(pruning_masks.make_global_masks(magnitudes, share))
    masks.apply_to_weights()
    return model


@pytest.mark.slow
def test_converted_models_give_the_same_outputs() -> None:
    model = build_pruned_lenet()
    images = torch.randn(5, 28, 28)
    with torch.no_grad():
        expected = model.eval()(images)
        stripped = pruning_savings.strip_masks(model)
        assert torch.equal(stripped(images), expected)
        for parameter in stripped.parameters():
            is_negative_zero = (parameter == 0) & parameter.signbit()
            assert not is_negative_zero.any()
        unpruned = networks.build_network("lenet5", (28, 28), 10)
        assert stripped.state_dict().keys() == unpruned.state_dict().keys()

        csr = pruning_savings.convert_to_csr(stripped)
        assert torch.allclose(csr(images), expected, atol=1e-5)
        layer_types = [type(layer).__name__ for layer in csr.children()]
        assert layer_types[4:] == ["CsrLinear", "CsrLinear"]
        quantized = int8.quantize_to_int8(stripped)(images)

    largest_error = (quantized - expected).abs().max()
    assert largest_error > 0
    assert largest_error < 0.1 * expected.abs().max()
    assert torch.equal(pruning_savings.strip_masks(model)(images), expected), "the conversion changed the model"


def test_zeros_save_bytes_only_when_compressed_or_in_csr() -> None:
    dense = pruning_savings.strip_masks(build_pruned_lenet(0.0))
    sparse = pruning_savings.strip_masks(build_pruned_lenet(0.9))
    dense_bytes, dense_compressed_bytes = pruning_savings.measure_file_sizes(dense)
    sparse_bytes, sparse_compressed_bytes = pruning_savings.measure_file_sizes(sparse)
    assert dense_bytes == sparse_bytes
    assert dense_bytes > 4 * 431_080
    assert sparse_compressed_bytes < 0.2 * dense_compressed_bytes
    for smaller in (pruning_savings.convert_to_csr(sparse), int8.quantize_to_int8(sparse)):
        smaller_bytes, _ = pruning_savings.measure_file_sizes(smaller)
        assert smaller_bytes < 0.35 * sparse_bytes


def test_two_of_four_sparsity_is_detected() -> None:
    (score,) = draw_scores((6, 32))
    (mask,) = pruning_masks.make_group_masks([score], 0.5, 4)
    weight = score * mask
    assert pruning_savings.has_two_of_four_sparsity(weight)
    assert not pruning_savings.has_two_of_four_sparsity(score)
    weight[3, :3] = 1.0
    assert not pruning_savings.has_two_of_four_sparsity(weight)
    assert not pruning_savings.has_two_of_four_sparsity(weight[:, :30])


def test_a_run_measures_int8_and_csr(digits: Settings, tmp_path: Path) -> None:
    completed = run_experiment("sparse_prune", *digits, *SMALL, "steps=30", "export=false", runs=tmp_path)
    result = completed.result
    difference = result["int8_accuracy"] - result["test_accuracy"]
    assert abs(difference) < 0.05
    assert result["bytes_csr"] < result["bytes_raw"]
    assert result["int8_bytes_raw"] < result["bytes_raw"]
    assert "than fp32" in completed.stdout
    assert not (completed.folder.path / "model.pt2").exists()


def test_a_sweep_compares_accuracies_with_the_dense_model_of_the_same_seed() -> None:
    sizes = ("bytes_raw", "bytes_compressed", "bytes_csr", "fp32_seconds", "bf16_seconds", "csr_seconds")
    rows: list[dict[str, Any]] = []
    for seed, dense_accuracy in ((0, 0.98), (1, 0.96)):
        for sparsity, lost_accuracy in ((None, 0.0), (0.995, 0.01), (0.999, 0.03)):
            cell: dict[str, Any] = {"schedule": "none", "seed": seed}
            nonzero = 1000.0
            if sparsity is not None:
                cell = {"criterion": "magnitude", "sparsity": sparsity, "seed": seed}
                nonzero = 1000 * (1 - sparsity)
            row = {"cell": cell, "weights": 1000, "nonzero": nonzero, "data": "digits"}
            row["test_accuracy"] = dense_accuracy - lost_accuracy
            rows.append(row | dict.fromkeys(sizes, 1.0))

    summary = GRID.summarize(Config(), 0, rows)
    _, *lines = summary.lines["medians"].splitlines()
    cells = {}
    for line in lines:
        label = line[4:21].strip()
        cells[label] = line[21:].split()
    assert cells["dense"][:2] == ["97.00%", "0.00"]
    assert cells["magnitude 99.5 %"][:2] == ["96.00%", "1.00"]
    assert cells["magnitude 99.9 %"][:2] == ["94.00%", "3.00"]


def test_csr_speed_is_inconclusive_if_repeats_disagree() -> None:
    csr_seconds = {"dense": (9, 9), "a": (2, 3), "b": (0.5, 1.5), "c": (0.1, 0.2)}
    rows: dict[str, list[dict[str, float]]] = {}
    for label, repeats in csr_seconds.items():
        rows[label] = []
        for seconds in repeats:
            rows[label].append({"csr_seconds": seconds, "fp32_seconds": 1.0, "bf16_seconds": 10.0})
    expected = "slower than dense fp32 for a; inconclusive (varies between seeds) for b; never slower than dense bf16"
    assert describe_csr_speed(rows) == expected


class TokenCounter(nn.Module):
    """Network for tokens [N, T] that multiplies by a float32 constant, which bf16 does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.embedding(x)) @ torch.eye(7)
        return outputs


def test_times_of_unsupported_variants_are_omitted() -> None:
    tokens = torch.arange(12).view(3, 4) % 7
    with_constant = TokenCounter()
    assert pruning_savings.time_inference(with_constant, tokens, with_constant).keys() == {"fp32", "smaller", "csr"}
    embedding = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))
    assert "bf16" in pruning_savings.time_inference(embedding, tokens, embedding)


def test_outputs_that_are_not_scores_of_classes_have_no_accuracy(cache: Path) -> None:
    test_images = Images(prepare_digits(cache), "test", 50)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(1))
    assert measure_accuracy(model, test_images, torch.device("cpu"), batch=20, dtype=torch.float32) is None


def test_repeats_of_a_python_grid_have_different_seeds() -> None:
    settings = ["levels=[0.8]", "criteria=[taylor]", "repeats=2"]
    grid = sweep_file.read_sweep_file("configs/sweeps/sparse_prune.py", settings)
    assert [point.values.get("criterion") for point in grid.points] == [None, "taylor"] * 2
    assert [point.settings.seed for point in grid.points] == [0, 0, 1, 1]
