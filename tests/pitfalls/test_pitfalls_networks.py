"""The mistakes about a network's sizes and its first weights: what they really do, and what is right instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.data.loader import Images
from common.data.prepare import prepare_digits
from common.models import model_file
from common.models.networks import ConvNet
from common.system.errors import UserError
from common.training.evaluate import measure_accuracy
from configs.resnet_dataparallel import Config
from configs.shared import InitialWeights
from tests.harness.registry import REPLICATED
from tests.harness.shared import Make


class TutorialCNN(nn.Module):
    """The well-known network: its flatten size is right for 64 pixels, or for 32 with one pooling less."""

    def __init__(self, colours: int, padding: int = 1) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(n, m, 3, padding=padding) for n, m in ((colours, 32), (32, 64)))
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
    model, x = TutorialCNN(shape[0], padding), torch.randn(4, *shape)
    assert model.features(x).flatten(1).shape == (4, features)
    with pytest.raises(RuntimeError, match=f"cannot be multiplied \\(4x{features} and 16384x10\\)"):
        model.fc(model.features(x).flatten(1))
    with pytest.raises(RuntimeError, match=r"shape '\[-1, 16384\]' is invalid"):
        model(x)
    assert ConvNet(shape, 10)(x).shape == (4, 10), "a network that counts its features takes every shape"


def test_a_view_with_a_wrong_flatten_size_merges_images() -> None:
    model, x, y = TutorialCNN(3), torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    out = model(x)
    assert out.shape == (16, 10), "of 64 images, and without an error"
    changed = x.clone()
    changed[3] += 1
    differs = (model(changed) != out).any(1)
    assert differs.tolist() == [True] + [False] * 15, "the fourth image counts for the first answer"
    with pytest.raises(ValueError, match=r"batch_size \(16\) to match target batch_size \(64\)"):
        F.cross_entropy(out, y)
    assert F.cross_entropy(out, y[: len(out)]).isfinite(), "with as many labels it trains on nonsense"
    right = ConvNet((3, 32, 32), 10)
    assert (right(changed) != right(x)).any(1).nonzero().tolist() == [[3]]
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(64x3136 and 12544x100\)"):
        right(x[..., :18, :18])  # a quarter of the features


class GreyToColour(nn.Module):
    """Grey images [N, H, W] as [N, 3, H, W]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None].expand(-1, 3, -1, -1)


def test_a_model_without_weights_is_not_pretrained(finished: Make, cache: Path) -> None:
    done = finished(REPLICATED)
    test, cpu = Images(prepare_digits(cache), "test", done.result["test_samples"]), torch.device("cpu")

    def score(model: nn.Module) -> float:
        return measure_accuracy(model.eval(), test, cpu, batch=100, dtype=torch.float32)

    import torchvision  # takes 2 s, which other tests need not wait for

    def draw(seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        return torchvision.models.resnet18(num_classes=10, **options)

    with pytest.warns(UserWarning, match="'pretrained' is deprecated"):
        old = draw(0, pretrained=False)
    new, other = draw(0, weights=None), draw(1, weights=None)
    assert torch.equal(old.fc.weight, new.fc.weight) and not torch.equal(new.fc.weight, other.fc.weight), "drawn"
    chance = [score(nn.Sequential(GreyToColour(), model)) for model in (new, other)]
    shape, runs = (28, 28), str(done.runs)
    chance.append(score(model_file.init_network(Config(runs=runs, model="mlp"), shape, 10)))
    assert max(chance) < 0.16, "a tenth, and what 333 images leave to luck"
    trained = model_file.init_network(
        Config(runs=runs, model="mlp", initial=InitialWeights(done.folder.path.name)), shape, 10
    )
    assert score(trained) == pytest.approx(done.result["test_accuracy"])
    assert score(trained) > 0.2, "after 40 steps"
    with pytest.raises(UserError, match="weights=pretrained: no such file, checkpoint folder or run"):
        model_file.init_network(Config(runs=runs, initial=InitialWeights("pretrained")), shape, 10)
