"""The number of floating-point operations per token equals the count of torch's counter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from common.models.gpt import GPT
from common.techniques.parallel_layout import layout_formulas
from common.techniques.parallel_layout.layout_report import list_parameter_sizes
from common.techniques.parallel_layout.model_shape import Shape

WIDTH = 32
LAYERS = 2
CONTEXT = 24
SAMPLES = 3
VOCABULARY = 40


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_equals_the_counted_operations(tied: bool) -> None:
    model = GPT(CONTEXT, VOCABULARY, width=WIDTH, layers=LAYERS, heads=4, tied=tied)
    tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    arguments = model.recipe["arguments"]
    shape = Shape(
        width=WIDTH,
        layers=LAYERS,
        heads=4,
        key_value_heads=4,
        hidden=arguments["hidden"],
        is_gated=True,
        vocabulary=VOCABULARY,
        context=CONTEXT,
        samples=SAMPLES,
        microbatches=1,
        dropout=False,
        element_bytes=4,
    )
    sizes = list_parameter_sizes(model)
    flops = layout_formulas.count_flops_per_token(sizes, shape, is_tied=tied)
    recomputed = 2 * LAYERS * CONTEXT * WIDTH  # scores that attention computes again in its backward pass
    assert counter.get_total_flops() == (flops + recomputed) * SAMPLES * CONTEXT
