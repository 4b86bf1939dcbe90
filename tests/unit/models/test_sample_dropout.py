"""Dropout by position: the mask of a sample does not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.models import networks
from common.models.sample_dropout import SampleDropout, add_dropout, list_dropout_layers


def apply_dropout(rows: Tensor, *microbatches: range, epoch: int = 0, seed: int = 0) -> Tensor:
    """Return the output for `rows` [n, ...], which the layer gets in these microbatches."""
    layer = SampleDropout(0.25, seed)
    layer.set_positions(epoch, microbatches)
    outputs = [layer(rows[positions.start : positions.stop]) for positions in microbatches]
    return torch.cat(outputs)


def test_the_mask_of_a_sample_does_not_depend_on_microbatches_or_precision() -> None:
    rows = torch.rand(40, 3, 5, dtype=torch.float64) + 1
    output = apply_dropout(rows, range(40))
    assert torch.equal(apply_dropout(rows, range(7), range(7, 7), range(7, 30), range(30, 40)), output)
    assert torch.equal(apply_dropout(rows.float(), range(40)) == 0, output == 0)

    is_kept = output != 0
    assert torch.allclose(output[is_kept], rows[is_kept] / 0.75)
    assert not torch.equal(is_kept[0], is_kept[1])


def test_masks_differ_between_epochs_and_seeds() -> None:
    rows = torch.rand(40, 3, 5, dtype=torch.float64) + 1
    output = apply_dropout(rows, range(40))
    assert not torch.equal(apply_dropout(rows, range(40), epoch=1), output)
    assert not torch.equal(apply_dropout(rows, range(40), seed=1), output)


def test_values_are_dropped_in_training_only() -> None:
    layer = SampleDropout(0.25, 0)
    rows = torch.ones(1000, 100)
    dropped_share = (layer(rows) == 0).double().mean()
    assert abs(dropped_share - 0.25) < 0.01
    assert torch.equal(layer(rows), layer(rows)), "without positions, the rows are the first samples"
    assert layer.eval()(rows) is rows


def test_another_number_of_samples_is_refused() -> None:
    layer = SampleDropout(0.25, 0)
    layer.set_positions(0, [range(3)])
    with pytest.raises(ValueError, match="got 4 samples for a microbatch of 3"):
        layer(torch.ones(4, 2))


def test_dropout_before_the_last_layer_does_not_change_the_names_of_a_network() -> None:
    network = networks.build_network("mlp", (28, 28), 10)
    names = [name for name, _ in network.named_parameters()]
    assert list_dropout_layers([add_dropout(network, 0.0, 0)]) == []
    assert len(list_dropout_layers([nn.Linear(2, 2), add_dropout(network, 0.25, 0)])) == 1

    assert [name for name, _ in network.named_parameters()] == names
    assert list(network.state_dict()) == names
    assert [type(layer).__name__ for layer in network][-2:] == ["SampleDropout", "Linear"]


def test_dropout_precedes_a_last_layer_that_is_used_twice() -> None:
    activation = nn.ReLU()
    network = add_dropout(nn.Sequential(nn.Linear(2, 2), activation, nn.Linear(2, 2), activation), 0.5, 0)
    assert [type(layer) for layer in network] == [nn.Linear, nn.ReLU, nn.Linear, SampleDropout, nn.ReLU]
