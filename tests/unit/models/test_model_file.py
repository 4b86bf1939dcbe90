"""Files of models and weights: what a run writes, and which files are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

from common.checkpoint.train_state import get_model_recipe
from common.models import model_file, networks
from common.models.model_file import load_initial_weights
from common.runs.folder import RunFolder
from common.system.errors import UserError
from configs.ddp_multinode import Config
from configs.shared import InitialWeights


class MaliciousObject:
    """An object whose pickle prints a line when it is loaded."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


MISMATCHES = [
    (lambda state: state.pop("fc.bias"), r"missing tensor fc\.bias \(1 in total\)"),
    (lambda state: state.update(extra=torch.zeros(1)), "unexpected tensor extra"),
    (lambda state: state.update({"fc.bias": torch.zeros(5)}), r"fc\.bias has shape \(5,\), expected \(3,\)"),
    (lambda state: state.update(epoch=3), "not a state dict: expected a mapping from names to tensors"),
    (
        lambda state: state.update(object=MaliciousObject()),
        "expected a file written by torch.save that contains only tensors",
    ),
]


@pytest.mark.parametrize("change, message", MISMATCHES)
def test_weights_that_do_not_match_the_model_are_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = networks.ResNet("resnet18", (3, 8, 8), 3, width=2)
    state = dict(model.state_dict())
    change(state)
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(UserError, match=message):
        load_initial_weights(model, str(tmp_path / "weights.pt"), "runs")
    assert "executed" not in capfd.readouterr().out


def test_missing_files_and_other_folders_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(UserError, match="no such file"):
        load_initial_weights(model, str(tmp_path / "nowhere.pt"), "runs")
    with pytest.raises(UserError, match="must be a run folder or a checkpoint folder"):
        load_initial_weights(model, str(tmp_path), "runs")


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps([1])], ids=["empty", "text", "pickle"])
def test_files_without_weights_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=r"weights=.*file: "):
        load_initial_weights(nn.Sequential(nn.Linear(1, 1)), str(tmp_path / "file"), "runs")


class Subclass(networks.SimpleNN):
    """A custom network that inherits the recipe of its parent class."""


RESNET_RECIPE = {"class": "ResNet18", "arguments": {"shape": [8, 8], "classes": 3}}
NETWORK_RECIPES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "network": (lambda: networks.SimpleNN(8), {"class": "SimpleNN"}),
    "resnet": (lambda: networks.ResNet18((8, 8), 3), RESNET_RECIPE),
    "subclass": (lambda: Subclass(8), {"class": "Subclass", "arguments": None}),
    "network inside another": (
        lambda: nn.Sequential(networks.SimpleNN(8), nn.Linear(10, 3)),
        {"class": "Sequential", "arguments": None},
    ),
    "network with another layer": (
        lambda: networks.SimpleNN(8).append(nn.Linear(10, 3)),
        {"class": None, "arguments": None},
    ),
}


@pytest.mark.parametrize("build, recipe", NETWORK_RECIPES.values(), ids=NETWORK_RECIPES)
def test_a_model_file_has_all_tensors_and_the_recipe_of_the_model(
    build: Callable[[], nn.Module], recipe: dict[str, Any], tmp_path: Path
) -> None:
    model = build()
    state = model.state_dict()
    layer = next(layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d))
    mask = torch.ones_like(layer.weight, dtype=torch.bool)
    layer.register_buffer("mask", mask)  # only training needs it

    model_file.write_model(RunFolder(tmp_path), model.state_dict(), get_model_recipe(model), {})
    tensors = load_file(tmp_path / "model.safetensors")
    assert_close(tensors, state, rtol=0, atol=0)

    facts = json.loads((tmp_path / "model.json").read_text())
    assert recipe.items() <= facts.items()
    if facts["arguments"] is not None:
        model_file.build_model(facts).load_state_dict(tensors)


TIED_NETWORK = """import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.first = nn.Linear(shape[0], outputs, bias=False)
        self.second = nn.Linear(shape[0], outputs)
        self.second.weight = self.first.weight
        self.register_buffer("mask", torch.arange(shape[0]) > 0)

    def forward(self, x):
        return self.first(x * self.mask) + self.second(x)
"""


def test_a_custom_network_with_shared_parameters_and_a_mask_is_rebuilt_from_the_run(tmp_path: Path) -> None:
    own_code = tmp_path / "code" / "own"
    own_code.mkdir(parents=True)
    (own_code / "model-1.py").write_text(TIED_NETWORK)
    model = networks.build_network(f"{own_code}/model-1.py:Tied", (4,), 3).double()
    state = networks.list_saved_tensors(model)
    assert list(state) == ["first.weight", "second.bias", "mask"], "as in a checkpoint"
    facts = dict.fromkeys(model_file.REQUIRED_FACTS - {"class", "arguments"}) | {"dtype": "float64", "scores": {}}
    model_file.write_model(RunFolder(tmp_path), state, get_model_recipe(model), facts)

    loaded_facts, loaded_model = model_file.load_model(RunFolder(tmp_path))
    assert loaded_facts["class"] == "Tied"
    assert loaded_facts["file"] == "model-1.py"
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(loaded_model(x), model(x))

    load_initial_weights(model, str(tmp_path / "model.safetensors"), "runs")
    (own_code / "model-1.py").write_text(TIED_NETWORK.replace("outputs, bias=False)", "1, bias=False)"))
    with pytest.raises(UserError, match=r"first\.weight has shape \(3, 4\), expected \(1, 4\)"):
        model_file.load_model(RunFolder(tmp_path))


@pytest.mark.parametrize(
    "recipe", [{"class": "SimpleNN", "arguments": {"width": 8, "depth": 3}}, {"class": "LeNet300", "arguments": {}}]
)
def test_recipes_of_older_versions_without_a_shape_are_for_digits(recipe: dict[str, Any]) -> None:
    assert model_file.build_model(recipe)(torch.zeros(2, 28, 28)).shape == (2, 10)


def test_training_can_start_from_a_file_of_weights(tmp_path: Path) -> None:
    weights = networks.build_network("convnet", (28, 28), 10).state_dict()
    torch.save(weights, tmp_path / "weights.pt")
    cfg = Config(initial=InitialWeights(str(tmp_path / "weights.pt")))
    loaded_state = model_file.init_network(cfg, (28, 28), 10).state_dict()
    assert_close(loaded_state, weights, rtol=0, atol=0)

    random_state = model_file.init_network(Config(), (28, 28), 10).state_dict()
    assert not torch.equal(random_state["conv1.weight"], loaded_state["conv1.weight"])
