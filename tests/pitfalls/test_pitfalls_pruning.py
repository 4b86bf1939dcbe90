"""The mistakes about pruning: what they really do, and what stands here instead."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from common.models.networks import SimpleNN
from common.techniques.pruning import pruning_masks, pruning_savings
from common.techniques.pruning.pruning_masks import Masks, soft_threshold
from tests.harness.ddp_pitfalls import made


def pruned(share: float = 0.9) -> tuple[nn.Sequential, Masks]:
    torch.manual_seed(0)
    model = SimpleNN()
    masks = Masks(model)
    masks.replace_masks(pruning_masks.make_global_masks([weight.detach().abs() for weight in masks.weights], share))
    masks.apply_to_weights()
    return model, masks


def test_pruning_whole_tensors_by_their_mean_empties_the_first_layer() -> None:
    model, x = SimpleNN(), torch.randn(9, 28, 28)
    weights = {name: value.detach() for name, value in model.named_parameters() if name.endswith("weight")}
    mean = torch.cat([weight.flatten() for weight in weights.values()]).abs().mean()
    small = [name for name, weight in weights.items() if weight.abs().mean() < mean]
    assert small == ["fc1.weight"], "it has most inputs, so it begins with the smallest weights"
    with torch.no_grad():
        weights["fc1.weight"].zero_()
        assert len(model(x).unique(dim=0)) == 1, "whatever the image, the answer is the same"
        other, masks = pruned(0.5)
        assert all(mask.any() for mask in masks.masks) and len(other(x).unique(dim=0)) == 9


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_without_a_mask_pruned_weights_grow_back(kind: Callable[..., torch.optim.Optimizer]) -> None:
    x, y = torch.randn(32, 28, 28), torch.arange(32) % 10

    def zeros_after(keep: bool) -> float:
        model, masks = pruned()
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if keep:
                masks.apply_to_weights()
        return 1 - sum(map(pruning_masks.count_nonzero, masks.weights)) / masks.weight_count

    assert zeros_after(keep=False) < 0.1, "nine of ten were zero"
    assert zeros_after(keep=True) == pytest.approx(0.9, abs=1e-5)


def test_the_sign_of_a_magnitude_moves_all_weights_the_same_way() -> None:
    weight = torch.randn(100, 100)
    mistake, right = weight.clone(), weight.clone()
    for _ in range(50):
        mistake -= 0.01 * mistake.abs().sign()
        soft_threshold([right], 0.01)
    assert mistake.count_nonzero() == 10_000, "nothing is pruned"
    assert torch.allclose(mistake, weight - 0.5, atol=1e-4), "negative weights have even grown"
    near = weight.abs() < 0.49
    assert (right[near] == 0).all() and near.sum() > 3000
    far = weight.abs() > 0.51
    assert torch.allclose(right[far], (weight - 0.5 * weight.sign())[far], atol=1e-4)


def test_masks_computed_per_rank_differ() -> None:
    one, other = made("masks_per_rank", module="pruning_pitfalls")["masks_per_rank"]
    assert one[0] != other[0], "the models drift apart, and rank 0's checkpoint is not what the others train"
    assert "masks of ranks [1] differ from those of rank 0" in one[1]["error"] == other[1]["error"]
    assert one[2] == other[2] == one[3] == other[3]


def test_compilers_are_no_sparsity_tools() -> None:
    """What TorchScript, and by way of torch.export XLA, get to see is the dense model."""

    def script(model: nn.Module) -> tuple[str, int]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            scripted = torch.jit.script(model)
            file = io.BytesIO()
            torch.jit.save(scripted, file)
            return str(scripted.inlined_graph), len(file.getvalue())

    models = [nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10)) for _ in range(2)]
    masks = Masks(models[1])
    masks.replace_masks(pruning_masks.make_global_masks([weight.detach().abs() for weight in masks.weights], 0.9))
    masks.apply_to_weights()
    bare = [pruning_savings.strip_masks(model) for model in models]
    (graph, size), (other_graph, other_size) = (script(model) for model in bare)
    assert "aten::linear" in graph and "sparse" not in other_graph
    assert graph.count("aten::") == other_graph.count("aten::") and size == pytest.approx(other_size, rel=1e-3)
    programs = [torch.export.export(model, (torch.randn(2, 784),)) for model in bare]
    calls = [[str(node.target) for node in program.graph.nodes] for program in programs]
    assert calls[0] == calls[1] and "aten.linear.default" in calls[1]


def test_zeros_are_multiplied_like_any_other_number() -> None:
    dense, (model, masks), x = SimpleNN(), pruned(), torch.randn(16, 28, 28)

    def operations(of: Callable[[Tensor], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            of(x)
        return counter.get_total_flops()

    assert sum(map(pruning_masks.count_nonzero, masks.weights)) == pytest.approx(0.1 * masks.weight_count, abs=1), (
        "a tenth of the operations?"
    )
    assert operations(model) == operations(dense) == 2 * 16 * masks.weight_count
    bare = pruning_savings.strip_masks(model)
    assert (
        pruning_savings.measure_file_sizes(bare)[0]
        == pruning_savings.measure_file_sizes(pruning_savings.strip_masks(dense))[0]
    )
    times = pruning_savings.time_inference(bare, x)  # so time is measured, with kernels that leave the zeros out
    assert times.keys() == {"fp32", "bf16", "csr"} and min(times.values()) > 0
