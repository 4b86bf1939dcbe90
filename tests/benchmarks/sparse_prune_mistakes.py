"""Mistakes to plant in pruning (tests/benchmarks/planted_mistakes_list.py)."""

from __future__ import annotations

from tests.benchmarks.planted_mistakes_list import Mistake

MISTAKES = [
    Mistake(
        "layer-pruned-to-nothing",
        "common/techniques/pruning/pruning_masks.py",
        "min(round(sparsity * len(norms)), len(norms) - 1)",
        "min(round(sparsity * len(norms)), len(norms))",
    ),
    Mistake(
        "mask-forgotten",  # gradients and momentum bring pruned weights back
        "experiments/sparse_prune.py",
        """\
        if masks.sparsity:
            masks.apply_to_weights()  # the optimizer also changed pruned weights
""",
        "",
    ),
    Mistake(
        "smallest-gradients-grow",
        "common/techniques/pruning/pruning_masks.py",
        "growth_scores = -weight.grad.abs().masked_fill(remaining, -1)",
        "growth_scores = weight.grad.abs().masked_fill(remaining, math.inf)",
    ),
]
