"""Networks have the documented shapes, and ResNets equal those of torchvision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from common.checkpoint.train_state import get_model_recipe
from common.models import model_file, networks, weights
from common.models.model_file import load_initial_weights
from common.system.errors import UserError
from common.techniques.pipeline import partition
from configs.networks import MIN_IMAGE_SIZES, check_shape


def save_weights(folder: Path, state: dict[str, Tensor]) -> str:
    file = folder / "weights.pt"
    torch.save(state, file)
    return str(file)


@pytest.mark.slow
@pytest.mark.parametrize("name, side", [("resnet18", 65), ("resnet50", 64)])
def test_a_resnet_with_weights_of_torchvision_has_its_outputs(name: str, side: int, tmp_path: Path) -> None:
    import torchvision  # takes 2 s, so only the tests that need it import it

    reference = getattr(torchvision.models, name)(num_classes=7).double()
    reference(torch.randn(4, 3, side, side).double())  # changes the running statistics
    model = networks.ResNet(name, (3, side, side), 7).double()
    load_initial_weights(model, save_weights(tmp_path, reference.state_dict()), "runs")

    images = torch.randn(2, 3, side, side).double()
    for is_training in (True, False):
        model.train(is_training)
        reference.train(is_training)
        assert torch.allclose(model(images), reference(images), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(networks.RESNETS))
def test_a_resnet_has_the_names_and_shapes_of_torchvision(name: str) -> None:
    import torchvision

    with torch.device("meta"):
        reference = getattr(torchvision.models, name)(num_classes=7)
        model = networks.ResNet(name, (3, 64, 64), 7)
    shapes = model_file.get_tensor_shapes(model.state_dict())
    assert len(shapes) > 100
    assert shapes == model_file.get_tensor_shapes(weights.convert_parameter_names(reference.state_dict()))


def test_the_stem_of_a_resnet_keeps_the_size_of_small_images() -> None:
    small = networks.ResNet("resnet18", (3, 32, 32), 10, width=4)
    assert small[0](torch.zeros(1, 3, 32, 32)).shape[-1] == 32
    assert "maxpool" not in dict(small.named_children())

    large = networks.ResNet("resnet18", (3, 64, 64), 10, width=4)
    assert large[0](torch.zeros(1, 3, 64, 64)).shape[-1] == 32
    assert "maxpool" in dict(large.named_children())


@pytest.mark.parametrize("name", list(networks.RESNETS))
def test_a_resnet_can_be_split_after_every_layer(name: str) -> None:
    model = networks.ResNet(name, (1, 16, 16), 3, width=2).eval()
    images = torch.randn(2, 16, 16)
    _, *starts = dict(model.named_children())
    activation = images
    for stage in partition.split_into_stages(model, starts):
        activation = stage(activation)
    assert torch.equal(activation, model(images))


def test_the_prefix_of_ddp_is_removed_from_names(tmp_path: Path) -> None:
    source = networks.ResNet("resnet18", (3, 8, 8), 3, width=2)
    model = networks.ResNet("resnet18", (3, 8, 8), 3, width=2)
    ddp_state = {f"module.{name}": tensor for name, tensor in source.state_dict().items()}
    load_initial_weights(model, save_weights(tmp_path, ddp_state), "runs")
    assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_old_files_without_the_number_of_batches_are_read(tmp_path: Path) -> None:
    import torchvision

    reference = torchvision.models.resnet18(num_classes=3)
    reference.bn1.running_mean.fill_(5)
    state = reference.state_dict()
    old_state = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    assert len(old_state) < len(state)

    model = networks.ResNet("resnet18", (3, 64, 64), 3)
    load_initial_weights(model, save_weights(tmp_path, old_state), "runs")
    loaded_state = model.state_dict()
    assert loaded_state["bn1.num_batches_tracked"] == 0
    assert (loaded_state["bn1.running_mean"] == 5).all()
    assert torch.equal(loaded_state["layer4_1.conv2.weight"], old_state["layer4.1.conv2.weight"])

    del old_state["bn1.running_mean"]
    with pytest.raises(UserError, match=r"missing tensor bn1\.running_mean \(1 in total\)"):
        load_initial_weights(model, save_weights(tmp_path, old_state), "runs")


@pytest.mark.parametrize("side_of_file, side_of_model", [(64, 32), (32, 64)])
def test_weights_for_another_image_size_are_refused(side_of_file: int, side_of_model: int, tmp_path: Path) -> None:
    source = networks.ResNet("resnet18", (3, side_of_file, side_of_file), 3, width=2)
    model = networks.ResNet("resnet18", (3, side_of_model, side_of_model), 3, width=2)
    file = save_weights(tmp_path, source.state_dict())
    with pytest.raises(UserError, match=r"conv1\.weight .* expected .*; .* 64 pixels, .* change data\.image_size"):
        load_initial_weights(model, file, "runs")


@pytest.mark.parametrize("name", ["mlp", "lenet300", "lenet5", "convnet", "resnet18", "resnet50"])
def test_a_network_accepts_images_of_any_shape_and_is_rebuilt_from_its_recipe(name: str) -> None:
    model = networks.build_network(name, (3, 20, 16), 7)
    assert model(torch.zeros(2, 3, 20, 16)).shape == (2, 7)
    rebuilt = model_file.build_model(get_model_recipe(model))
    assert [p.shape for p in rebuilt.parameters()] == [p.shape for p in model.parameters()]


@pytest.mark.parametrize("name", ["mlp", "lenet300"])
def test_fully_connected_networks_accept_vectors(name: str) -> None:
    model = networks.build_network(name, (9,), 4)
    assert model(torch.zeros(2, 9)).shape == (2, 4)


@pytest.mark.parametrize("name", ["lenet5", "convnet", "resnet18", "resnet50"])
def test_convolutional_networks_refuse_vectors(name: str) -> None:
    with pytest.raises(UserError, match="needs images, got vectors of 9 numbers"):
        networks.build_network(name, (9,), 4)


@pytest.mark.parametrize(
    "shape, message",
    [
        ((), "contains single numbers, but the model needs vectors"),
        ((9,), "contains vectors, but model=convnet needs images; use another data set, model=mlp"),
        ((24, 2), r"contains samples of shape \[24, 2\], but model=convnet needs images of at least 6x6 pixels; use"),
        ((2, 3, 4, 5), r"contains samples of shape \[2, 3, 4, 5\], but model=convnet needs images"),
    ],
    ids=str,
)
def test_shapes_of_custom_data_that_a_built_in_network_refuses(shape: tuple[int, ...], message: str) -> None:
    check_shape("own.py:Net", "own.py:load", shape)
    check_shape("convnet", "own.py:load", (3, 20, 16))
    if shape:
        check_shape("mlp", "own.py:load", shape)
    with pytest.raises(ValueError, match=message):
        check_shape("convnet", "own.py:load", shape)


@pytest.mark.parametrize("name", ["lenet5", "convnet"])
def test_images_that_are_too_small_are_refused(name: str) -> None:
    size = MIN_IMAGE_SIZES[name]
    networks.build_network(name, (3, size, size), 4)
    check_shape(name, "own.py:load", (3, size, size))
    with pytest.raises(UserError, match=r"images of shape .* are too small"):
        networks.build_network(name, (3, size - 1, size), 4)
    with pytest.raises(ValueError, match=f"model={name} needs images of at least {size}x{size} pixels"):
        check_shape(name, "own.py:load", (3, size - 1, size))


def test_the_default_simple_network_has_three_layers() -> None:
    shapes = [tuple(p.shape) for p in networks.SimpleNN().parameters()]
    assert shapes == [(128, 784), (128,), (64, 128), (64,), (10, 64), (10,)]
    large = networks.SimpleNN(width=1024, depth=4)
    assert sum(p.numel() for p in large.parameters()) > 2_000_000


def test_the_toy_network_has_ten_inputs_ten_hidden_units_and_five_outputs() -> None:
    shapes = [tuple(p.shape) for p in networks.Toy((10,), 5).parameters()]
    assert shapes == [(10, 10), (10,), (5, 10), (5,)]


def test_resnet50_has_the_stem_of_imagenet_and_its_weights_do_not_fit_resnet18() -> None:
    with torch.device("meta"):
        resnet50 = networks.build_network("resnet50", (3, 64, 64), 10)
        resnet18 = networks.build_network("resnet18", (3, 64, 64), 10)
    assert sum(p.numel() for p in resnet50.parameters()) == 23_528_522  # torchvision's number for ten classes
    stem_shape = resnet50.get_submodule("conv1").get_parameter("weight").shape
    assert stem_shape == (64, 3, 7, 7)

    state = resnet18.state_dict() | {"conv1.weight": torch.zeros(stem_shape)}
    with pytest.raises(UserError, match="use model=resnet50, or an experiment whose resnet18 adapts"):
        weights.load_weights(resnet18, state, "weights.pt")
