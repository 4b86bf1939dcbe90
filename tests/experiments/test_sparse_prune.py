"""Masks are exact: as many weights as asked, chosen right, and zero to the end; and what is written can be used."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoint import storage
from common.config import config
from common.models import networks
from common.system import seeds
from common.system.errors import UserError
from common.techniques.pruning import int8, pruning_masks, pruning_savings, pruning_schedules
from common.techniques.pruning.pruning_masks import Masks
from configs.sparse_prune import CRITERIA, Config
from configs.sweeps.sparse_prune import GRID, describe_csr_speed
from experiments import sparse_prune
from slurm.launch import sweep_file
from tests.harness.processes import Done, run

# a run takes half a second; begin=0.1 and end=0.6 are steps 1 and 7 of 12
SMALL = ("model=mlp", "batch=16", "steps=12", "data.test_limit=100", "optim.warmup=0", "launch.threads=1")
QUIET = (*SMALL, "export=false", "int8=false")
SAVING = (*QUIET, "every=2", "checkpoint.every_steps=1", "checkpoint.every_seconds=0", "checkpoint.keep=100")
TOTAL = 784 * 128 + 128 * 64 + 64 * 10  # weights of the mlp
SHAPES = [(8, 1, 3, 3), (30, 50), (10, 30)]


def made(*shapes: tuple[int, ...], levels: int = 0, seed: int = 0) -> list[Tensor]:
    """Scores; with `levels`, only so many different ones."""
    source = torch.Generator().manual_seed(seed)
    found = [torch.rand(shape, generator=source) for shape in shapes]
    return [(score * levels).floor() for score in found] if levels else found


def pruned(masks: list[Tensor]) -> int:
    return sum(int((~mask).sum()) for mask in masks)


# ---- exactly so many


@pytest.mark.parametrize("levels", [0, 1, 3], ids=["all different", "all equal", "three values"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.92, 0.999, 1.0])
def test_as_many_are_pruned_as_asked_whatever_the_ties(share: float, levels: int) -> None:
    scores = made(*SHAPES, levels=levels)
    total = sum(score.numel() for score in scores)
    masks = pruning_masks.make_global_masks(scores, share)
    assert pruned(masks) == round(share * total)
    gone = torch.cat([score[~mask] for score, mask in zip(scores, masks, strict=True)])
    left = torch.cat([score[mask] for score, mask in zip(scores, masks, strict=True)])
    assert not len(gone) or not len(left) or gone.max() <= left.min()
    layers = pruning_masks.make_layer_masks(scores, [share] * len(scores))
    assert pruned(layers) == round(share * total)
    for score, mask in zip(scores, layers, strict=True):
        assert abs(pruned([mask]) - share * score.numel()) < 1


@pytest.mark.parametrize("kind", ["random", "sorted", "two values", "a sample that misleads"])
def test_of_many_numbers_the_kth_is_exact(kind: str) -> None:
    count = 17 * pruning_masks.SAMPLE_SIZE + 5
    values = torch.rand(count, generator=torch.Generator().manual_seed(0))
    if kind == "sorted":
        values = values.sort().values
    if kind == "two values":
        values = (values > 0.5).float()
    if kind == "a sample that misleads":
        values[:: count // pruning_masks.SAMPLE_SIZE] = -1.0
    ordered = values.sort().values
    for k in (1, 2, count // 10, count // 2, int(0.9 * count), count - 1, count):
        parts = [values[: count // 3].view(1, -1), values[count // 3 :]]
        assert pruning_masks.find_kth_smallest(parts, k) == ordered[k - 1], k
        assert sum(int(mask.sum()) for mask in pruning_masks.select_lowest_scores(parts, k)) == k


def test_what_is_pruned_stays_pruned_and_layers_are_compared_as_asked() -> None:
    cfg = Config()
    model = networks.build_network("lenet300", (28, 28), 10)
    masks = Masks(model)
    nothing: Any = None
    with torch.no_grad():
        masks.weights[0].mul_(100)
    masks.replace_masks(pruning_masks.make_global_masks(sparse_prune.score_weights(cfg, nothing, model, masks, 0), 0.1))
    shares = [float(mask.float().mean()) for mask in masks.masks]
    assert shares[0] > 0.98 and shares[1] < 0.3, "a layer with large weights loses nearly none"
    cfg = Config(criterion="random")
    before = [mask.clone() for mask in masks.masks]
    masks.replace_masks(pruning_masks.make_global_masks(sparse_prune.score_weights(cfg, nothing, model, masks, 1), 0.8))
    assert masks.sparsity == pytest.approx(0.8, abs=1 / masks.weight_count)
    assert not any((now & ~then).any() for now, then in zip(masks.masks, before, strict=True)), "none comes back"
    cfg = Config(criterion="magnitude", normalize="layer")
    masks.replace_masks([torch.ones_like(mask) for mask in masks.masks])
    masks.replace_masks(pruning_masks.make_global_masks(sparse_prune.score_weights(cfg, nothing, model, masks, 0), 0.5))
    assert [float(mask.float().mean()) for mask in masks.masks] == pytest.approx([0.5] * 3, abs=0.04)


@pytest.mark.parametrize(("pattern", "shape"), [("2:4", (6, 3, 3, 3)), ("1:4", (5, 16)), ("3:8", (4, 50))])
def test_n_of_m_holds_in_every_group(pattern: str, shape: tuple[int, ...]) -> None:
    left, size = Config(pattern=pattern).parse_pattern()
    for levels in (0, 2):
        (score,) = made(shape, levels=levels)
        (mask,) = pruning_masks.make_group_masks([score], 1 - left / size, size)
        rows, end = mask.flatten(1), score[0].numel() // size * size
        assert (rows[:, :end].reshape(-1, size).sum(1) == left).all()
        assert rows[:, end:].all(), "what fills no group stays"
        groups, values = rows[:, :end].reshape(-1, size), score.flatten(1)[:, :end].reshape(-1, size)
        gone, stays = values.masked_fill(groups, -1), values.masked_fill(~groups, math.inf)
        assert (gone.max(1).values <= stays.min(1).values).all()


def test_channels_go_as_a_whole_and_the_last_layer_stays() -> None:
    scores = made((8, 4, 3, 3), (20, 30), (10, 20))
    scores[0][2], scores[0][5] = 0.01, 0.02
    masks = pruning_masks.make_channel_masks(scores, 0.25)
    assert [bool(channel.any()) for channel in masks[0]] == [i not in (2, 5) for i in range(8)]
    assert all(channel.all() or not channel.any() for mask in masks for channel in mask)
    assert pruned(masks[1:2]) == 5 * 30 and masks[2].all()
    assert [int(mask.flatten(1).any(1).sum()) for mask in pruning_masks.make_channel_masks(scores, 0.999)] == [1, 1, 10]
    scores[0][1], scores[0][5] = 0.0, pruning_masks.PRUNED_SCORE
    (mask, *_) = pruning_masks.make_channel_masks(scores, 1 / 8)
    assert not mask[5].any() and mask[1].all(), "one that is pruned goes before one that is worth nothing"


def test_rigl_begins_with_its_distribution() -> None:
    shapes = [torch.Size(shape) for shape in [(300, 784), (100, 300), (10, 100)]]
    shares = pruning_masks.allocate_erdos_renyi_sparsities(shapes, 0.92)
    left = sum((1 - share) * shape.numel() for share, shape in zip(shares, shapes, strict=True))
    assert left == pytest.approx(0.08 * sum(shape.numel() for shape in shapes))
    assert shares[0] > shares[1] > shares[2] == 0, "the last layer would be more than dense"
    densities = [(1 - share) * shape.numel() / sum(shape) for share, shape in zip(shares, shapes, strict=True)][:2]
    assert densities[0] == pytest.approx(densities[1]), "density goes as the sum over the product of the sides"


def test_rigl_exchanges_the_smallest_for_those_with_the_largest_gradients() -> None:
    model = nn.Sequential(nn.Linear(20, 10, bias=False))
    masks, optimizer = Masks(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (weight,) = masks.weights
    source = torch.Generator().manual_seed(0)
    masks.replace_masks(pruning_masks.make_layer_masks([torch.rand(weight.shape, generator=source)], [0.5]))
    masks.apply_to_weights()
    weight.grad = torch.randn(weight.shape, generator=source)
    optimizer.step()
    masks.apply_to_weights()
    before, values, then = masks.masks[0].clone(), weight.detach().clone(), weight.grad
    pruning_masks.drop_and_grow(masks, optimizer, 0.3)
    masks.apply_to_weights()
    after = masks.masks[0]
    assert int(after.sum()) == int(before.sum()) == 100
    gone, come = before & ~after, after & ~before
    assert int(come.sum()) == int(gone.sum()) > 0
    assert values[gone].abs().max() <= values[before & after & (weight != 0)].abs().min()
    assert then[come].abs().min() >= then[~before & ~after].abs().max()
    assert (weight[come] == 0).all() and (optimizer.state[weight]["momentum_buffer"][come] == 0).all()
    assert torch.equal(weight[before & after & (weight != 0)], values[before & after & (weight != 0)])


# ---- when


@pytest.mark.parametrize("schedule", ["oneshot", "iterative", "cubic", "rigl"])
@pytest.mark.parametrize("total", [1, 3, 7, 100, 1000])
def test_every_schedule_ends_at_the_sparsity_asked_for(schedule: Any, total: int) -> None:
    cfg = Config(schedule=schedule, sparsity=0.9, every=7)
    found = [(step, pruning_schedules.compute_sparsity(cfg, step, total)) for step in range(total + 1)]
    steps = {step: share for step, share in found if share is not None}
    assert list(steps.values())[-1] == pytest.approx(0.9)
    assert all(a <= b for a, b in itertools.pairwise(steps.values()))
    assert all(step <= round(0.6 * total) for step in steps)
    if total == 1000:
        assert len(steps) == {"oneshot": 1, "iterative": 5, "cubic": 72, "rigl": 86}[schedule]
    if schedule == "cubic" and total == 1000:
        assert steps[100 + 70] == pytest.approx(0.9 * (1 - (1 - 70 / 500) ** 3))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["levels=[0.9,2]"], ["levels=[0.9,2]", "below 1"]),
        (["criteria=[size]"], ["criteria=[size]", "magnitude, gradient"]),
        (["scope=n:m"], ["sparsity=0.92", "pattern=2:4", "use sparsity=0.5"]),
        (["pattern=4:2"], ["pattern=4:2", "n < m"]),
        (["scope=layer", "normalize=layer"], ["normalize=layer", "scope=global"]),
        (["sweep=true", "schedule=none"], ["schedule=none", "use another schedule"]),
        (["model=lenet5", "data.name=generated", "data.image_size=8"], ["data.image_size=8", "16 or more"]),
        (["begin=0.7", "end=0.6"], ["begin=0.7", "end=0.6", "lower begin"]),
        (["schedule=rigl", "criterion=taylor"], ["criterion=taylor", "rigl", "criterion=magnitude"]),
        (["schedule=rigl", "scope=structured"], ["scope=structured", "rigl", "scope=layer"]),
        (["batch=63", "processes_per_node=2"], ["batch=63", "2 ranks", "batch=62 or 64"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load_config(Config, words, {})
    assert all(part in str(caught.value) for part in parts), caught.value


# ---- through training


@pytest.mark.parametrize("pattern", ["1:3", "2:4", "3:7", "5:9"])
def test_the_sparsity_that_a_refusal_names_is_taken(pattern: str) -> None:
    words = ["scope=n:m", f"pattern={pattern}"]
    with pytest.raises(UserError) as caught:
        config.load_config(Config, words, {})
    named = str(caught.value).partition("use ")[2].partition(" or ")[0]
    cfg = config.load_config(Config, [*words, named], {})
    left, size = cfg.parse_pattern()
    (mask,) = pruning_masks.make_group_masks(made((4, 5 * size)), cfg.sparsity, size)
    assert (mask.view(-1, size).sum(1) == left).all()


def states(done: Done) -> dict[int, dict[str, Tensor]]:
    """The model in each checkpoint, by step."""
    assert done.status == 0, done.err + done.out
    (attempt,) = done.folder.list_attempts()
    found = storage.list_checkpoints(attempt)
    return {one.step: torch.load(one.path / "rank-0.pt", weights_only=True)["model"] for one in found}


@pytest.mark.parametrize("words", [("optim.name=sgd", "optim.weight_decay=0.01"), ("optim.name=adam",), ("l1=0.01",)])
def test_pruned_weights_stay_zero_to_the_bit(words: tuple[str, ...], digits: tuple[str, ...], tmp_path: Path) -> None:
    done = run("sparse_prune", *digits, *SAVING, "processes_per_node=2", *words, runs=tmp_path)
    shares = []
    for step, model in states(done).items():
        masks = {name: mask for name, mask in model.items() if name.endswith("weight_mask")}
        assert len(masks) == 3 and all(mask.dtype == torch.bool for mask in masks.values())
        for name, mask in masks.items():
            assert (model[name.removesuffix("_mask")][~mask] == 0).all(), (step, name)
        shares.append(sum(int((~mask).sum()) for mask in masks.values()) / sum(m.numel() for m in masks.values()))
    assert len(shares) == 12 and shares[-1] == round(0.92 * TOTAL) / TOTAL and shares[0] == 0
    assert shares == sorted(shares) and shares[6:] == shares[-1:] * 6, "after `end` masks stay"
    assert len(set(shares)) == 4, "it was pruned three times"
    assert done.result["sparsity"] == pytest.approx(shares[-1])
    assert [row["sparsity"] for row in done.folder.read_metrics() if "loss" in row] == pytest.approx(shares)


@pytest.mark.parametrize("words", [("schedule=rigl",), ("scope=structured",), ("scope=layer", "schedule=iterative")])
def test_pruned_weights_stay_zero_with_other_scopes_and_after_a_resume(
    words: tuple[str, ...], digits: tuple[str, ...], tmp_path: Path
) -> None:
    all_words = (*digits, *SAVING, "sparsity=0.9", *words)
    begun = run("sparse_prune", *all_words, runs=tmp_path)
    last = max(states(begun))
    (begun.folder.path / "result.json").unlink()  # as if it had been killed
    saved = begun.folder.list_attempts()[0].attempt_folder / "checkpoints"
    for step in range(last - 4, last + 1):
        shutil.rmtree(saved / f"step-{step:08d}")
    done = run("sparse_prune", "--resume", str(begun.folder.path), runs=tmp_path)
    assert done.status == 0, done.err
    for attempt in done.folder.list_attempts():
        for one in storage.list_checkpoints(attempt):
            model = torch.load(one.path / "rank-0.pt", weights_only=True)["model"]
            masks = {name: mask for name, mask in model.items() if name.endswith("weight_mask")}
            for name, mask in masks.items():
                assert (model[name.removesuffix("_mask")][~mask] == 0).all(), (one, name)
                assert words[0] != "scope=structured" or (mask.all(1) | ~mask.any(1)).all(), "whole units"
            if one.step == last:
                units = [int(mask.any(1).sum()) for mask in masks.values()]
                kept = sum(int(mask.sum()) for mask in masks.values())
                assert units == [13, 6, 10] if words[0] == "scope=structured" else kept == TOTAL - round(0.9 * TOTAL)
    assert len(done.folder.list_attempts()) == 2 and one.step == last


def test_a_start_that_asks_for_less_gives_nothing_back(digits: tuple[str, ...], tmp_path: Path) -> None:
    begun = run("sparse_prune", *digits, *SAVING, "steps=6", runs=tmp_path)
    before = states(begun)[6]
    (begun.folder.path / "result.json").unlink()
    words = ("--resume", str(begun.folder.path), "steps=16", "sparsity=0.5")
    done = run("sparse_prune", *words, runs=tmp_path)
    assert done.status == 0, done.err
    newest = storage.list_checkpoints(done.folder.list_attempts()[-1])[-1]
    after = torch.load(newest.path / "rank-0.pt", weights_only=True)["model"]
    gone = {name: ~mask for name, mask in before.items() if name.endswith("weight_mask")}
    assert newest.step == 16 and sum(int(mask.sum()) for mask in gone.values()) > 0.5 * TOTAL
    for name, mask in gone.items():
        assert (after[name.removesuffix("_mask")][mask] == 0).all()


def test_two_of_four_hold_after_fine_tuning(digits: tuple[str, ...], tmp_path: Path) -> None:
    words = ("model=lenet5", "scope=n:m", "sparsity=0.5", "steps=6", "batch=8")
    for step, model in states(run("sparse_prune", *digits, *SAVING, *words, runs=tmp_path)).items():
        for name in ("conv1", "conv2", "fc1", "fc2"):
            rows, mask = (model[f"{name}.{kind}"].flatten(1) for kind in ("weight", "weight_mask"))
            groups = mask[:, : rows.shape[1] // 4 * 4].reshape(-1, 4).sum(1)
            assert step < 4 or (groups == 2).all(), (step, name)
            assert (rows[~mask] == 0).all()


def test_l1_makes_zeros_without_masks_and_more_of_them_the_stronger_it_is(
    digits: tuple[str, ...], tmp_path: Path
) -> None:
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = weight.clone()
    pruning_masks.soft_threshold([weight], 0.3)
    assert torch.equal(weight != 0, before.abs() > 0.3), "exactly those that are nearer to zero than the step"
    assert torch.allclose(weight[weight != 0].abs(), before.abs()[weight != 0] - 0.3)
    counts = []
    for l1 in (0, 0.01, 0.1):
        words = (*digits, *QUIET, "schedule=none", f"l1={l1}", "steps=20")
        done = run("sparse_prune", *words, runs=tmp_path / str(l1))
        assert done.status == 0, done.err
        counts.append(done.result["nonzero"])
        assert done.result["sparsity"] == pytest.approx(1 - counts[-1] / TOTAL)
    assert counts[0] == TOTAL and counts[0] > 1.005 * counts[1] > 1.1 * counts[2]


def test_colour_images_are_pruned_as_well(cache: Path, tmp_path: Path) -> None:
    images = ("data.name=generated", f"data.cache={cache}", "data.image_size=16", "data.samples=64")
    words = ("model=lenet5", "batch=8", "eval_batch=8", "epochs=1", "steps=4", "every=1", "processes_per_node=2")
    done = run("sparse_prune", *QUIET, *images, *words, runs=tmp_path)
    assert done.status == 0, done.err
    result = done.result
    assert result["weights"] == 20 * 3 * 25 + 50 * 20 * 25 + 500 * 50 + 10 * 500
    assert result["nonzero"] == result["weights"] - round(0.92 * result["weights"])


# ---- the sweep


@pytest.mark.parametrize(
    ("words", "pruned"),
    [
        ([], [(name, level) for level in (0.8, 0.92, 0.97, 0.99) for name in CRITERIA]),
        (["schedule=rigl"], [("magnitude", level) for level in (0.8, 0.92, 0.97, 0.99)]),
        (["scope=n:m", "sparsity=0.5", "criteria=[taylor]"], [("taylor", 0.5)]),
    ],
)
def test_the_grid_of_a_sweep_fits_the_settings(words: list[str], pruned: list[tuple[str, float]]) -> None:
    cells = GRID.points(config.load_config(Config, ["sweep=true", *words], {}), 0)
    plain = {"export": False, "int8": False}
    assert cells[0] == plain | {"schedule": "none", "l1": 0}, "the dense model"
    assert cells[1:] == [plain | {"criterion": name, "sparsity": level} for name, level in pruned]


# ---- what it saves


def a_model(share: float = 0.9) -> nn.Module:
    torch.manual_seed(seeds.derive_seed(0, "init"))
    model = networks.build_network("lenet5", (28, 28), 10)
    masks = Masks(model)
    masks.replace_masks(pruning_masks.make_global_masks([weight.abs() for weight in masks.weights], share))
    masks.apply_to_weights()
    return model


def test_other_forms_of_the_model_give_its_outputs() -> None:
    model, x = a_model(), torch.randn(5, 28, 28)
    with torch.no_grad():
        expected = model.eval()(x)
        bare = pruning_savings.strip_masks(model)
        assert torch.equal(bare(x), expected)
        assert not any((tensor == 0).logical_and(tensor.signbit()).any() for tensor in bare.parameters())
        assert bare.state_dict().keys() == networks.build_network("lenet5", (28, 28), 10).state_dict().keys()
        assert torch.allclose(pruning_savings.convert_to_csr(bare)(x), expected, atol=1e-5)
        layers = [type(layer).__name__ for layer in pruning_savings.convert_to_csr(bare).children()]
        assert layers[4:] == ["CsrLinear", "CsrLinear"]
        small = int8.quantize_to_int8(bare)(x)
    assert 0 < float((small - expected).abs().max()) < 0.1 * float(expected.abs().max())
    assert torch.equal(pruning_savings.strip_masks(model)(x), expected), "the model itself stays as it is"


def test_zeros_save_bytes_only_when_compressed_or_in_csr() -> None:
    sizes = {
        share: pruning_savings.measure_file_sizes(pruning_savings.strip_masks(a_model(share))) for share in (0.0, 0.9)
    }
    assert sizes[0.0][0] == sizes[0.9][0] > 4 * 431_080
    assert sizes[0.9][1] < 0.2 * sizes[0.0][1]
    assert (
        pruning_savings.measure_file_sizes(pruning_savings.convert_to_csr(pruning_savings.strip_masks(a_model())))[0]
        < 0.35 * sizes[0.9][0]
    )
    assert (
        pruning_savings.measure_file_sizes(int8.quantize_to_int8(pruning_savings.strip_masks(a_model())))[0]
        < 0.35 * sizes[0.9][0]
    )


def test_two_of_four_is_known_by_its_groups() -> None:
    (score,) = made((6, 32))
    (mask,) = pruning_masks.make_group_masks([score], 0.5, 4)
    weight = score * mask
    assert pruning_savings.has_two_of_four_sparsity(weight) and not pruning_savings.has_two_of_four_sparsity(score)
    weight[3, :3] = 1.0
    assert not pruning_savings.has_two_of_four_sparsity(weight) and not pruning_savings.has_two_of_four_sparsity(
        weight[:, :30]
    )


def test_a_run_measures_its_other_forms(digits: tuple[str, ...], tmp_path: Path) -> None:
    done = run("sparse_prune", *digits, *SMALL, "steps=30", "export=false", runs=tmp_path)
    assert done.status == 0, done.err
    result = done.result
    assert abs(result["int8_accuracy"] - result["test_accuracy"]) < 0.05
    assert result["bytes_csr"] < result["bytes_raw"] > result["int8_bytes_raw"]
    assert "than fp32" in done.out and not (done.folder.path / "model.pt2").exists()


def test_a_sweep_tells_points_below_the_dense_model_of_the_same_seed(tmp_path: Path) -> None:
    sizes = ("bytes_raw", "bytes_compressed", "bytes_csr", "fp32_seconds", "bf16_seconds", "csr_seconds")
    rows: list[dict[str, Any]] = []
    for seed, dense in ((0, 0.98), (1, 0.96)):
        for level, lost in ((None, 0.0), (0.995, 0.01), (0.999, 0.03)):
            cell = {"schedule": "none"} if level is None else {"criterion": "magnitude", "sparsity": level}
            row = {"cell": cell | {"seed": seed}, "test_accuracy": dense - lost, "weights": 1000, "data": "digits"}
            rows.append(row | {"nonzero": 1000 * (1 - (level or 0))} | dict.fromkeys(sizes, 1.0))
    table = GRID.summarize(Config(), 0, rows).lines["medians"].splitlines()
    found = {line[4:21].strip(): line[21:].split() for line in table[1:]}
    assert [found[name][:2] for name in ("dense", "magnitude 99.5 %", "magnitude 99.9 %")] == [
        ["97.00%", "0.00"],
        ["96.00%", "1.00"],
        ["94.00%", "3.00"],
    ]


def test_the_verdict_knows_when_repeats_disagree() -> None:
    def rows(*csr: float) -> list[dict[str, float]]:
        return [{"csr_seconds": value, "fp32_seconds": 1.0, "bf16_seconds": 10.0} for value in csr]

    words = describe_csr_speed({"dense": rows(9, 9), "a": rows(2, 3), "b": rows(0.5, 1.5), "c": rows(0.1, 0.2)})
    assert words == (
        "slower than dense fp32 for a; inconclusive (varies between seeds) for b; never slower than dense bf16"
    )


def test_repeats_of_a_python_grid_have_seeds_of_their_own_where_accuracy_counts() -> None:
    words = ["levels=[0.8]", "criteria=[taylor]", "repeats=2"]
    grid = sweep_file.read_sweep_file("configs/sweeps/sparse_prune.py", words)
    assert [(point.values.get("criterion"), point.settings.seed) for point in grid.points] == [
        (None, 0),
        ("taylor", 0),
        (None, 1),
        ("taylor", 1),
    ]
