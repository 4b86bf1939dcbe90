"""Dropout by position: the masks of samples, whatever the batch in which they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.models import networks
from common.models.sample_dropout import SampleDropout, add_dropout, list_dropout_layers


def drop(rows: Tensor, *microbatches: range, epoch: int = 0, seed: int = 0) -> Tensor:
    """What is left of `rows` [n, ...], of which each microbatch is given to the layer by itself."""
    layer = SampleDropout(0.25, seed)
    layer.set_positions(epoch, microbatches)
    return torch.cat([layer(rows[positions.start : positions.stop]) for positions in microbatches])


def test_a_mask_is_that_of_the_sample_however_a_batch_is_cut() -> None:
    rows = torch.rand(40, 3, 5, dtype=torch.float64) + 1
    alone = drop(rows, range(40))
    assert torch.equal(drop(rows, range(7), range(7, 7), range(7, 30), range(30, 40)), alone)
    assert torch.equal(drop(rows.float(), range(40)) == 0, alone == 0), "in another precision, too"
    left = alone != 0
    assert torch.allclose(alone[left], rows[left] / 0.75) and not torch.equal(left[0], left[1])
    for other in (drop(rows, range(40), epoch=1), drop(rows, range(40), seed=1)):
        assert not torch.equal(other, alone)


def test_a_share_is_dropped_while_training_and_nothing_else() -> None:
    layer = SampleDropout(0.25, 0)
    rows = torch.ones(1000, 100)
    assert abs((layer(rows) == 0).double().mean() - 0.25) < 0.01
    assert torch.equal(layer(rows), layer(rows)), "outside of steps: the first samples"
    assert layer.eval()(rows) is rows


def test_another_number_of_samples_is_refused() -> None:
    layer = SampleDropout(0.25, 0)
    layer.set_positions(0, [range(3)])
    with pytest.raises(ValueError, match="got 4 samples for a microbatch of 3"):
        layer(torch.ones(4, 2))


def test_a_network_drops_inputs_of_its_last_layer_and_keeps_its_names() -> None:
    network = networks.build_network("mlp", (28, 28), 10)
    names = [name for name, _ in network.named_parameters()]
    assert list_dropout_layers([add_dropout(network, 0.0, 0)]) == []
    assert len(list_dropout_layers([nn.Linear(2, 2), add_dropout(network, 0.25, 0)])) == 1
    assert [name for name, _ in network.named_parameters()] == names == [*network.state_dict()]
    assert [type(layer).__name__ for layer in network][-2:] == ["SampleDropout", "Linear"]
