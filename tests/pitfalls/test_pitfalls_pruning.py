"""Mistakes with pruning: what they do, and what this repository does instead."""

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
from tests.harness.pitfalls.outcomes import collect_outcome


def prune(model: nn.Module, share: float = 0.9) -> Masks:
    """Set the smallest weights of a model to zero."""
    masks = Masks(model)
    masks.replace_masks(pruning_masks.make_global_masks([weight.detach().abs() for weight in masks.weights], share))
    masks.apply_to_weights()
    return masks


def build_pruned_model(share: float = 0.9) -> tuple[nn.Sequential, Masks]:
    torch.manual_seed(0)
    model = SimpleNN()
    return model, prune(model, share)


def count_nonzero_weights(masks: Masks) -> int:
    return sum(pruning_masks.count_nonzero(weight) for weight in masks.weights)


def test_pruning_whole_tensors_by_their_mean_empties_the_first_layer() -> None:
    model = SimpleNN()
    x = torch.randn(9, 28, 28)
    weights = {name: value.detach() for name, value in model.named_parameters() if name.endswith("weight")}
    mean = torch.cat([weight.flatten() for weight in weights.values()]).abs().mean()
    small = [name for name, weight in weights.items() if weight.abs().mean() < mean]
    assert small == ["fc1.weight"], "the layer with the most inputs has the smallest initial weights"
    with torch.no_grad():
        weights["fc1.weight"].zero_()
        assert len(model(x).unique(dim=0)) == 1, "all images have the same output"
        pruned_model, masks = build_pruned_model(0.5)
        for mask in masks.masks:
            assert mask.any()
        assert len(pruned_model(x).unique(dim=0)) == 9


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_without_a_mask_pruned_weights_grow_back(kind: Callable[..., torch.optim.Optimizer]) -> None:
    x = torch.randn(32, 28, 28)
    y = torch.arange(32) % 10

    def train_and_measure_sparsity(apply_masks: bool) -> float:
        model, masks = build_pruned_model()
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if apply_masks:
                masks.apply_to_weights()
        return 1 - count_nonzero_weights(masks) / masks.weight_count

    assert train_and_measure_sparsity(apply_masks=False) < 0.1, "the sparsity was 0.9"
    assert train_and_measure_sparsity(apply_masks=True) == pytest.approx(0.9, abs=1e-5)


def test_the_sign_of_a_magnitude_moves_all_weights_the_same_way() -> None:
    weight = torch.randn(100, 100)
    mistake = weight.clone()
    correct = weight.clone()
    for _ in range(50):
        mistake -= 0.01 * mistake.abs().sign()
        soft_threshold([correct], 0.01)
    assert mistake.count_nonzero() == 10_000, "nothing is pruned"
    assert torch.allclose(mistake, weight - 0.5, atol=1e-4), "negative weights have grown"
    is_small = weight.abs() < 0.49
    assert is_small.sum() > 3000
    assert (correct[is_small] == 0).all()
    is_large = weight.abs() > 0.51
    assert torch.allclose(correct[is_large], (weight - 0.5 * weight.sign())[is_large], atol=1e-4)


def test_masks_computed_per_rank_differ() -> None:
    first, second = collect_outcome("pruning_pitfalls", "masks_per_rank")
    digests = [rank["digest of local gradients"] for rank in (first, second)]
    errors = [rank["outcome of local gradients"]["error"] for rank in (first, second)]
    assert digests[0] != digests[1], "the ranks train different models, and the checkpoint contains that of rank 0"
    assert "masks of ranks [1] differ from those of rank 0" in errors[0]
    assert errors[0] == errors[1]
    assert first["digest"] == second["digest"] == first["outcome"] == second["outcome"]


def test_compilers_are_no_sparsity_tools() -> None:
    """TorchScript, and XLA through torch.export, compile the dense model."""

    def script(model: nn.Module) -> tuple[str, int]:
        """Return the graph of a compiled model and the bytes of its file."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            scripted = torch.jit.script(model)
            file = io.BytesIO()
            torch.jit.save(scripted, file)
            return str(scripted.inlined_graph), len(file.getvalue())

    def list_calls(model: nn.Module) -> list[str]:
        program = torch.export.export(model, (torch.randn(2, 784),))
        return [str(node.target) for node in program.graph.nodes]

    dense = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    masked = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    prune(masked)
    sparse = pruning_savings.strip_masks(masked)
    dense_graph, dense_bytes = script(pruning_savings.strip_masks(dense))
    sparse_graph, sparse_bytes = script(sparse)
    assert "aten::linear" in dense_graph
    assert "sparse" not in sparse_graph
    assert dense_graph.count("aten::") == sparse_graph.count("aten::")
    assert dense_bytes == pytest.approx(sparse_bytes, rel=1e-3)
    assert list_calls(sparse) == list_calls(dense)
    assert "aten.linear.default" in list_calls(sparse)


def test_zeros_are_multiplied_like_any_other_number() -> None:
    dense = SimpleNN()
    model, masks = build_pruned_model()
    x = torch.randn(16, 28, 28)

    def count_operations(forward: Callable[[Tensor], Tensor]) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            forward(x)
        return counter.get_total_flops()

    assert count_nonzero_weights(masks) == pytest.approx(0.1 * masks.weight_count, abs=1)
    assert count_operations(dense) == 2 * 16 * masks.weight_count
    assert count_operations(model) == 2 * 16 * masks.weight_count, "zeros save no operation"
    sparse = pruning_savings.strip_masks(model)
    dense_bytes = pruning_savings.measure_file_sizes(pruning_savings.strip_masks(dense))[0]
    assert pruning_savings.measure_file_sizes(sparse)[0] == dense_bytes
    times = pruning_savings.time_inference(sparse, x, sparse)  # measures the time, also with kernels that skip zeros
    assert times.keys() == {"fp32", "bf16", "csr", "smaller"}
    assert min(times.values()) > 0


def test_torch_has_no_function_mean_abs() -> None:
    weight = torch.tensor([-3.0, 1.0])
    with pytest.raises(AttributeError, match="has no attribute 'mean_abs'"):
        torch.mean_abs(weight)  # type: ignore[attr-defined]
    assert weight.abs().mean() == 2
