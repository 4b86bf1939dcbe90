"""Mistakes with the sizes and the initial weights of a network: what they do, and what is correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.data.prepare import prepare_digits
from common.data.samples import Images
from common.models import model_file
from common.models.networks import ConvNet
from common.system.errors import UserError
from common.training.evaluate import measure_accuracy
from configs.resnet_dataparallel import Config
from configs.shared import InitialWeights
from tests.harness.environment.shared_results import GetRun
from tests.harness.experiments.registry import REPLICATED_ENTRY


class TutorialCNN(nn.Module):
    """The common network. Its flatten size is correct for 64 pixels, or for 32 pixels with one pooling layer less."""

    def __init__(self, colours: int, padding: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(colours, 32, 3, padding=padding)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=padding)
        self.fc = nn.Linear(64 * 16 * 16, 10)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for conv in (self.conv1, self.conv2):
            x = F.max_pool2d(cast(torch.Tensor, conv(x)).relu(), 2)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.fc(self.features(x).view(-1, 64 * 16 * 16)))


@pytest.mark.parametrize(("shape", "padding", "features"), [((1, 28, 28), 1, 64 * 7 * 7), ((3, 32, 32), 0, 64 * 6 * 6)])
def test_a_flatten_size_of_other_images_fails_at_the_first_forward(
    shape: tuple[int, ...], padding: int, features: int
) -> None:
    model = TutorialCNN(shape[0], padding)
    x = torch.randn(4, *shape)
    assert model.features(x).flatten(1).shape == (4, features)
    with pytest.raises(RuntimeError, match=f"cannot be multiplied \\(4x{features} and 16384x10\\)"):
        model.fc(model.features(x).flatten(1))
    with pytest.raises(RuntimeError, match=r"shape '\[-1, 16384\]' is invalid"):
        model(x)
    assert ConvNet(shape, 10)(x).shape == (4, 10), "a network that counts its features accepts every shape"


def test_a_view_with_a_wrong_flatten_size_merges_images() -> None:
    model = TutorialCNN(3)
    x = torch.randn(64, 3, 32, 32)
    y = torch.randint(10, (64,))
    logits = model(x)
    assert logits.shape == (16, 10), "64 images give 16 outputs, without an error"
    changed = x.clone()
    changed[3] += 1
    differs = (model(changed) != logits).any(1)
    assert differs.tolist() == [True] + [False] * 15, "the fourth image changes the first output"
    with pytest.raises(ValueError, match=r"batch_size \(16\) to match target batch_size \(64\)"):
        F.cross_entropy(logits, y)
    assert F.cross_entropy(logits, y[:16]).isfinite(), "a loss with 16 labels is computed without an error"
    correct_model = ConvNet((3, 32, 32), 10)
    assert (correct_model(changed) != correct_model(x)).any(1).nonzero().tolist() == [[3]]
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(64x3136 and 12544x100\)"):
        correct_model(x[..., :18, :18])  # a quarter of the features


class GreyToColour(nn.Module):
    """Grey images [N, H, W] as [N, 3, H, W]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None].expand(-1, 3, -1, -1)


def test_a_model_without_weights_is_not_pretrained(finished: GetRun, cache: Path) -> None:
    completed = finished(REPLICATED_ENTRY)
    test_images = Images(prepare_digits(cache), "test", completed.result["test_samples"])

    def score(model: nn.Module) -> float:
        accuracy = measure_accuracy(model.eval(), test_images, torch.device("cpu"), batch=100, dtype=torch.float32)
        assert accuracy is not None
        return accuracy

    import torchvision  # takes 2 s, which other tests need not wait for

    def build_resnet(seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        return torchvision.models.resnet18(num_classes=10, **options)

    with pytest.warns(UserWarning, match="'pretrained' is deprecated"):
        old_option = build_resnet(0, pretrained=False)
    first = build_resnet(0, weights=None)
    second = build_resnet(1, weights=None)
    assert torch.equal(old_option.fc.weight, first.fc.weight)
    assert not torch.equal(first.fc.weight, second.fc.weight), "the seed determines the weights"

    def init_network(weights: str) -> nn.Module:
        cfg = Config(runs=str(completed.runs), model="mlp", initial=InitialWeights(weights))
        return model_file.init_network(cfg, (28, 28), 10)

    for model in (nn.Sequential(GreyToColour(), first), nn.Sequential(GreyToColour(), second), init_network("none")):
        assert score(model) < 0.16, "a tenth, up to the variation with 333 images"
    trained = init_network(completed.folder.path.name)
    assert score(trained) == pytest.approx(completed.result["test_accuracy"])
    assert score(trained) > 0.2, "after 40 steps"
    with pytest.raises(UserError, match="weights=pretrained: no such file, checkpoint folder or run"):
        init_network("pretrained")
