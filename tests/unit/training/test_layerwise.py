"""LARS and LAMB compute what their papers say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.training import learning_rate, optimizers
from configs.shared import Optim

Reference = Callable[[np.ndarray, list[np.ndarray], list[float], float], np.ndarray]
RATES = [0.5, 1.0, 0.25, 0.1]


def compute_lars(w: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float) -> np.ndarray:
    """Algorithm 1 of arXiv 1708.03888, momentum 0.9, LARS coefficient 0.001."""
    v = np.zeros_like(w)
    for g, rate in zip(gradients, rates, strict=True):
        local_rate = 1.0
        if w.ndim > 1:
            norm = np.linalg.norm(w)
            local_rate = float(0.001 * norm / (np.linalg.norm(g) + decay * norm))
        v = 0.9 * v + rate * local_rate * (g + decay * w)
        w = w - v
    return w


def compute_lamb(w: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float) -> np.ndarray:
    """Algorithm 2 of arXiv 1904.00962 with its usual constants."""
    m = np.zeros_like(w)
    v = np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        corrected_m = m / (1 - 0.9**t)
        corrected_v = v / (1 - 0.999**t)
        r = corrected_m / (np.sqrt(corrected_v) + 1e-6) + decay * w
        trust_ratio = 1.0 if w.ndim < 2 else np.linalg.norm(w) / np.linalg.norm(r)
        w = w - rate * trust_ratio * r
    return w


@pytest.mark.parametrize("name, reference", [("lars", compute_lars), ("lamb", compute_lamb)])
@pytest.mark.parametrize("decay, decayed", [(0.0, "all"), (0.03, "all"), (0.03, "matrices")])
def test_lars_and_lamb_are_those_of_their_papers(name: str, reference: Reference, decay: float, decayed: Any) -> None:
    weights = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 3), (3, 2, 5, 5), (4,))]
    initial_weights = [w.detach().numpy().copy() for w in weights]
    gradients_by_weight: list[list[np.ndarray]] = [[], [], []]
    settings = Optim(name=name, lr=7, weight_decay=decay, decayed=decayed)
    optimizer = optimizers.build_optimizer(weights, settings)
    for rate in RATES:
        learning_rate.set_learning_rate(optimizer, rate)
        for w, gradients in zip(weights, gradients_by_weight, strict=True):
            w.grad = torch.randn_like(w)
            gradients.append(w.grad.numpy().copy())
        optimizer.step()

    for w, initial, gradients in zip(weights, initial_weights, gradients_by_weight, strict=True):
        decay_of_weight = 0.0 if decayed == "matrices" and w.ndim < 2 else decay
        expected = reference(initial, gradients, RATES, decay_of_weight)
        assert np.abs(w.detach().numpy() - expected).max() < 1e-12
        assert np.abs(expected - initial).max() > 1e-12


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_weights_of_zero_move_by_the_unscaled_step(name: str) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = optimizers.build_optimizer([weight], Optim(name=name, lr=0.1))
    for gradient in (torch.zeros(2, 2), torch.ones(2, 2)):  # the ratio of the norms would be 0 / 0
        weight.grad = gradient
        optimizer.step()
    assert weight.isfinite().all()
    assert (weight < 0).all()
