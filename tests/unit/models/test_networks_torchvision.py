"""ResNets compared with those of torchvision."""

from __future__ import annotations

import pytest
import torch

from common.models import networks


def test_resnet_equals_that_of_torchvision_except_for_the_stem() -> None:
    torchvision = pytest.importorskip("torchvision")
    reference = torchvision.models.resnet18(num_classes=10)
    reference.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    reference.maxpool = torch.nn.Identity()
    network = networks.build_network("resnet18", (3, 32, 32), 10)
    pairs = zip(network.state_dict().values(), reference.state_dict().values(), strict=True)
    for tensor, reference_tensor in pairs:
        assert tensor.shape == reference_tensor.shape
        tensor.copy_(reference_tensor)
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(network(images), reference(images), atol=1e-5)


def test_the_first_linear_layer_of_a_convnet_fits_the_image_size() -> None:
    assert networks.ConvNet((28, 28), 10).state_dict()["fc1.weight"].shape == (100, 64 * 12 * 12)
