"""Mistakes to plant in pruning (tests/benchmarks/planted_mistakes_list.py)."""

from __future__ import annotations

from tests.benchmarks.planted_mistakes_list import Mistake

MISTAKES = [
    Mistake(
        "layer-pruned-to-nothing",
        "common/techniques/pruning/pruning_masks.py",
        "min(round(sparsity * len(norms)), len(norms) - 1)",
        "min(round(sparsity * len(norms)), len(norms))",
        caught_by="tests/experiments/test_sparse_prune.py::test_whole_channels_are_pruned_and_the_last_layer_is_kept",
    ),
    Mistake(
        "mask-forgotten",  # gradients and momentum bring pruned weights back
        "experiments/sparse_prune.py",
        """\
        if masks.sparsity:
            masks.apply_to_weights()  # the optimizer also changed pruned weights
""",
        "",
        caught_by="tests/experiments/test_sparse_prune.py::test_pruned_weights_stay_zero_to_the_bit",
    ),
    Mistake(
        "smallest-gradients-grow",
        "common/techniques/pruning/pruning_masks.py",
        "growth_scores = -weight.grad.abs().masked_fill(remaining, -1)",
        "growth_scores = weight.grad.abs().masked_fill(remaining, math.inf)",
        caught_by="tests/experiments/test_sparse_prune.py"
        "::test_rigl_replaces_the_smallest_weights_by_those_with_the_largest_gradients",
    ),
]
