"""The largest ResNet computes what torchvision's does."""

from __future__ import annotations

from pathlib import Path

import torch
import torchvision

from common.models import networks, weights


def test_the_same_outputs_of_resnet101_as_torchvision_with_the_same_weights(tmp_path: Path) -> None:
    side = 65
    theirs = torchvision.models.resnet101(num_classes=7).double()
    theirs(torch.randn(4, 3, side, side).double())  # running statistics of its own
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    ours = networks.ResNet("resnet101", (3, side, side), 7).double()
    weights.load_weights(ours, weights.read_weights(str(tmp_path / "weights.pt"), tmp_path), "weights.pt")
    x = torch.randn(2, 3, side, side).double()
    for mode in (True, False):
        assert torch.allclose(ours.train(mode)(x), theirs.train(mode)(x), rtol=0, atol=1e-12)
