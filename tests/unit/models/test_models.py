"""The ResNets are torchvision's, under names that can be cut, and files of weights are read with care."""

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

from common.checkpoint.train_state import get_model_recipe
from common.models import model_file, networks
from common.runs.folder import RunFolder
from common.system.errors import UserError
from common.techniques.pipeline import partition
from configs.ddp_multinode import Config
from configs.shared import InitialWeights


def load(model: nn.Module, file: Path | str) -> None:
    networks.load_weights(model, model_file.read_weights(str(file), Path("runs")), str(file))


@pytest.mark.parametrize(("name", "side"), [("resnet18", 65), ("resnet50", 64)])
def test_the_same_outputs_as_torchvision_with_the_same_weights(name: str, side: int, tmp_path: Path) -> None:
    import torchvision  # takes 2 s, which other tests need not wait for

    theirs = getattr(torchvision.models, name)(num_classes=7).double()
    theirs(torch.randn(4, 3, side, side).double())  # running statistics of its own
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    ours = networks.ResNet(name, (3, side, side), 7).double()
    load(ours, tmp_path / "weights.pt")
    x = torch.randn(2, 3, side, side).double()
    for mode in (True, False):
        assert torch.allclose(ours.train(mode)(x), theirs.train(mode)(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(networks.RESNETS))
def test_the_same_names_and_shapes_as_torchvision(name: str) -> None:
    import torchvision

    with torch.device("meta"):
        theirs, ours = getattr(torchvision.models, name)(num_classes=7), networks.ResNet(name, (3, 64, 64), 7)
    states = networks.convert_parameter_names(theirs.state_dict()), ours.state_dict()
    shapes = [{key: value.shape for key, value in state.items()} for state in states]
    assert shapes[0] == shapes[1] and len(shapes[0]) > 100


def test_small_images_keep_their_size_at_the_stem() -> None:
    small, large = (networks.ResNet("resnet18", (3, side, side), 10, width=4) for side in (32, 64))
    assert small[0](torch.zeros(1, 3, 32, 32)).shape[-1] == 32 and "maxpool" not in dict(small.named_children())
    assert large[0](torch.zeros(1, 3, 64, 64)).shape[-1] == 32 and "maxpool" in dict(large.named_children())


@pytest.mark.parametrize("name", list(networks.RESNETS))
def test_resnets_can_be_cut_behind_every_layer(name: str) -> None:
    model = networks.ResNet(name, (1, 16, 16), 3, width=2).eval()
    x = torch.randn(2, 16, 16)
    layers = list(dict(model.named_children()))
    out = x
    for stage in partition.split_into_stages(model, layers[1:]):
        out = stage(out)
    assert torch.equal(out, model(x))


def test_weights_of_ddp_have_a_prefix_that_is_taken_off(tmp_path: Path) -> None:
    model, other = (networks.ResNet("resnet18", (3, 8, 8), 3, width=2) for _ in range(2))
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "ddp.pt")
    load(other, tmp_path / "ddp.pt")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_old_files_that_do_not_count_batches_are_read(tmp_path: Path) -> None:
    import torchvision

    theirs = torchvision.models.resnet18(num_classes=3)
    theirs.bn1.running_mean.fill_(5)
    old = {name: value for name, value in theirs.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert len(old) < len(theirs.state_dict())
    ours = networks.ResNet("resnet18", (3, 64, 64), 3)
    load(ours, saved(tmp_path, old))
    counted = ours.state_dict()
    assert counted["bn1.num_batches_tracked"] == 0 and (counted["bn1.running_mean"] == 5).all()
    assert torch.equal(counted["layer4_1.conv2.weight"], old["layer4.1.conv2.weight"])
    with pytest.raises(UserError, match=r"missing tensor bn1\.running_mean \(1 in total\)"):
        load(ours, saved(tmp_path, {name: value for name, value in old.items() if name != "bn1.running_mean"}))


@pytest.mark.parametrize(("file", "here"), [(64, 32), (32, 64)])
def test_the_stem_of_another_size_of_images_is_named(file: int, here: int, tmp_path: Path) -> None:
    theirs, ours = (networks.ResNet("resnet18", (3, side, side), 3, width=2) for side in (file, here))
    with pytest.raises(UserError, match=r"conv1\.weight .* expected .*; .* 64 pixels, .* change data\.image_size"):
        load(ours, saved(tmp_path, theirs.state_dict()))


class Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def saved(tmp_path: Path, content: Any) -> str:
    torch.save(content, tmp_path / "weights.pt")
    return str(tmp_path / "weights.pt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("fc.bias"), r"missing tensor fc\.bias \(1 in total\)"),
        (lambda state: state.update(extra=torch.zeros(1)), "unexpected tensor extra"),
        (lambda state: state.update({"fc.bias": torch.zeros(5)}), r"fc\.bias has shape \(5,\), expected \(3,\)"),
        (lambda state: state.update(epoch=3), "not a state dict: expected a mapping from names to tensors"),
        (lambda state: state.update(evil=Evil()), "expected a file written by torch.save that contains only tensors"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, words: str, tmp_path: Path, capfd: Any) -> None:
    model = networks.ResNet("resnet18", (3, 8, 8), 3, width=2)
    state = model.state_dict()
    change(state)
    with pytest.raises(UserError, match=words):
        load(model, saved(tmp_path, state))
    assert "executed" not in capfd.readouterr().out


def test_files_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UserError, match="no such file"):
        load(model, tmp_path / "nowhere.pt")
    for content in (b"", b"text", pickle.dumps([1])):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(UserError, match=r"weights=.*file: "):
            load(model, tmp_path / "file")
    with pytest.raises(UserError, match="must be a run folder or a checkpoint folder"):
        load(model, tmp_path)


@pytest.mark.parametrize("name", ["mlp", "lenet300", "lenet5", "convnet", "resnet18", "resnet50"])
def test_networks_take_images_of_any_shape_and_name_what_they_do_not_take(name: str) -> None:
    model = networks.build_network(name, (3, 20, 16), 7)
    assert model(torch.zeros(2, 3, 20, 16)).shape == (2, 7)
    again = model_file.build_model(model.recipe)  # type: ignore[arg-type]
    assert [p.shape for p in again.parameters()] == [p.shape for p in model.parameters()]
    if name in ("mlp", "lenet300"):
        assert networks.build_network(name, (9,), 4)(torch.zeros(2, 9)).shape == (2, 4)
        return
    with pytest.raises(UserError, match="needs images, got vectors of 9 numbers"):
        networks.build_network(name, (9,), 4)
    if name in ("lenet5", "convnet"):
        with pytest.raises(UserError, match=r"images of shape \[3, 2, 2\] are too small"):
            networks.build_network(name, (3, 2, 2), 4)


class Subclass(networks.SimpleNN):
    """A network of a user's own, which has its parent's recipe."""


@pytest.mark.parametrize(
    ("build", "recipe"),
    [
        (lambda: networks.SimpleNN(8), {"class": "SimpleNN"}),
        (lambda: networks.ResNet18((8, 8), 3), {"class": "ResNet18", "arguments": {"shape": [8, 8], "classes": 3}}),
        (lambda: Subclass(8), {"class": "Subclass", "arguments": None}),
        (lambda: nn.Sequential(networks.SimpleNN(8), nn.Linear(10, 3)), {"class": "Sequential", "arguments": None}),
        (lambda: networks.SimpleNN(8).append(nn.Linear(10, 3)), {"class": None, "arguments": None}),
    ],
    ids=["as it is", "of another class", "a subclass", "inside another", "with one more layer"],
)
def test_the_file_holds_all_tensors_and_the_recipe_of_that_very_model(
    build: Callable[[], nn.Module], recipe: dict[str, Any], tmp_path: Path
) -> None:
    model = build()
    state = model.state_dict()
    layer = next(layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d))
    layer.register_buffer("mask", torch.ones_like(layer.weight, dtype=torch.bool))  # only training needs it
    model_file.write_model(RunFolder(tmp_path), model.state_dict(), get_model_recipe(model), {})
    kept, facts = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "model.json").read_text())
    assert kept.keys() == state.keys() and all(torch.equal(kept[name], state[name]) for name in kept)
    assert recipe.items() <= facts.items()
    if facts["arguments"] is not None:
        model_file.build_model(facts).load_state_dict(kept)


def test_models_of_runs_from_before_networks_took_any_shape_are_built() -> None:
    for recipe in (
        {"class": "SimpleNN", "arguments": {"width": 8, "depth": 3}},
        {"class": "LeNet300", "arguments": {}},
    ):
        assert model_file.build_model(recipe)(torch.zeros(2, 28, 28)).shape == (2, 10)


def test_the_toy_is_10_10_5() -> None:
    assert [tuple(p.shape) for p in networks.Toy((10,), 5).parameters()] == [(10, 10), (10,), (5, 10), (5,)]


def test_data_parallel_training_begins_with_a_file_of_weights(tmp_path: Path) -> None:
    source = networks.build_network("convnet", (28, 28), 10)
    cfg = Config(initial=InitialWeights(str(saved(tmp_path, source.state_dict()))))
    found = model_file.init_network(cfg, (28, 28), 10).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in source.state_dict().items())
    drawn = model_file.init_network(Config(), (28, 28), 10).state_dict()
    assert not torch.equal(drawn["conv1.weight"], found["conv1.weight"])


def test_resnet50_has_the_stem_of_imagenet_and_weights_for_it_do_not_fit_resnet18(tmp_path: Path) -> None:
    with torch.device("meta"):
        large, small = (networks.build_network(name, (3, 64, 64), 10) for name in ("resnet50", "resnet18"))
    assert sum(p.numel() for p in large.parameters()) == 23_528_522  # torchvision's, with ten classes
    shape = large.get_submodule("conv1").get_parameter("weight").shape
    assert shape == (64, 3, 7, 7)
    with pytest.raises(UserError, match="use model=resnet50, or an experiment whose resnet18 adapts"):
        networks.load_weights(small, small.state_dict() | {"conv1.weight": torch.zeros(shape)}, "it")
