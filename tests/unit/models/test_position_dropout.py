"""Dropout by position: each value has one mask, for any division of samples and tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from common.models.position_dropout import PositionDropout

RATE = 0.25
ROWS = torch.rand(12, 8, 16, dtype=torch.float64) + 1


def apply_dropout(
    samples: range, *, seed: int = 0, name: str = "block0", epoch: int = 0, tokens: Sequence[int] | None = None
) -> Tensor:
    """Return the output for some samples of ROWS, or for some of their tokens."""
    layer = PositionDropout(RATE, seed, name)
    layer.set_positions(epoch, [samples])
    rows = ROWS[samples.start : samples.stop]
    if tokens is not None:
        layer.set_token_positions(torch.tensor(tokens), ROWS.shape[1] // len(tokens))
        rows = rows[:, tokens]
    return layer(rows)


def test_any_division_of_samples_and_tokens_drops_the_same_values() -> None:
    output = apply_dropout(range(12))
    by_samples = [apply_dropout(range(5)), apply_dropout(range(5, 5)), apply_dropout(range(5, 12))]
    assert torch.equal(torch.cat(by_samples), output)
    for tokens in ([2, 3], [0, 1, 6, 7], [5]):
        assert torch.equal(apply_dropout(range(12), tokens=tokens), output[:, tokens])
    is_kept = output != 0
    assert torch.allclose(output[is_kept], ROWS[is_kept] / (1 - RATE))


@pytest.mark.parametrize("change", [{"seed": 1}, {"name": "block1"}, {"epoch": 1}])
def test_another_seed_layer_or_epoch_has_independent_masks(change: dict[str, object]) -> None:
    dropped = (apply_dropout(range(12)) == 0).flatten()
    other = (apply_dropout(range(12), **change) == 0).flatten()  # type: ignore[arg-type]
    both = (dropped & other).double().mean().item()
    assert both == pytest.approx(RATE**2, abs=0.03)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_values_are_dropped_independently_with_the_given_rate(rate: float) -> None:
    dropped = PositionDropout(rate, 3, "embedding").draw_dropped(range(64), 64, 64).double()
    assert dropped.mean().item() == pytest.approx(rate, abs=0.005)
    for dim in range(3):
        first = dropped.narrow(dim, 0, 63)
        second = dropped.narrow(dim, 1, 63)
        assert (first * second).mean().item() == pytest.approx(rate**2, abs=0.005), "neighbors are independent"
        other_dims = [other for other in range(3) if other != dim]
        means = dropped.mean(other_dims)
        assert means.std().item() < 3 * (rate * (1 - rate)) ** 0.5 / 64, "no sample, token or column differs"


def test_nothing_is_dropped_in_eval_mode_or_with_rate_0() -> None:
    layer = PositionDropout(RATE, 0, "block0")
    assert layer.eval()(ROWS) is ROWS
    assert PositionDropout(0, 0, "block0")(ROWS) is ROWS


def test_the_masks_do_not_change() -> None:
    """A run is resumed by another version of this program with the same masks."""
    dropped = PositionDropout(0.5, 7, "block1/attention").draw_dropped(range(100, 101), 2, 8)
    assert dropped.int().tolist() == [[[1, 1, 0, 0, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1]]]
