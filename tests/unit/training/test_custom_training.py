"""Custom networks and losses are tried on samples of the data set before a run starts, and refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import config
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.system.errors import UserError
from common.training import custom_training, training_trial
from configs import ddp_multinode, mnist_pipeline, resnet_modelparallel

NETWORK = """from torch import nn


class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.layer = nn.Linear(4, outputs)

    def forward(self, x):
        return self.layer(x)
"""
LOSS = """import torch.nn.functional as F


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")
"""
DATA = """import numpy as np

X = np.random.default_rng(0).normal(size=(12, 4))


def labels(root):
    return X, np.arange(12) % 3, X, np.arange(12) % 3


def numbers(root):
    return X, X.sum(1), X, X.sum(1)


def vectors(root):
    return X, X[:, :2], X, X[:, :2]


def sequences(root):
    return X, np.ones((12, 4), int), X, np.ones((12, 4), int)
"""


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedDataset]:
    """The prepared data sets of DATA, by name."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "own.py").write_text(DATA)
    names = ("labels", "numbers", "vectors", "sequences")
    settings = config.load_config(ddp_multinode.Config, [f"data.cache={folder / 'sets'}"], {}).data
    return {name: prepare.prepare_dataset(replace(settings, name=f"{folder}/own.py:{name}")) for name in names}


def write_files(folder: Path, network: str = NETWORK, loss: str = LOSS) -> tuple[str, str]:
    (folder / "net.py").write_text(network)
    (folder / "loss.py").write_text(loss)
    return f"model={folder}/net.py:Net", f"loss={folder}/loss.py:loss"


def try_settings(
    data_sets: dict[str, PreparedDataset], name: str, *settings: str, schema: Any = ddp_multinode.Config
) -> None:
    """Check the files, the targets and, in this process, the network and the loss."""
    cfg = config.load_config(schema, [*settings, "batch=8"], {})
    custom_training.check_files_of_config(cfg)
    custom_training.check_targets(cfg, data_sets[name])
    training_trial.try_training(cfg, data_sets[name])


VALID = [
    ("labels", ()),
    ("labels", ("dtype=float64",)),
    ("numbers", ("loss=mse",)),
    ("vectors", ("loss=mse",)),
]


@pytest.mark.parametrize("name, settings", VALID, ids=str)
def test_a_network_is_accepted(
    tmp_path: Path, data_sets: dict[str, PreparedDataset], name: str, settings: tuple[str, ...]
) -> None:
    model, _ = write_files(tmp_path)
    try_settings(data_sets, name, model, *settings)


SEQUENCE_LOSS = """import torch.nn.functional as F


def loss(outputs, targets):
    steps = outputs[:, :, None].expand(-1, -1, 4)
    return F.cross_entropy(steps, targets, reduction="none").mean(1)
"""


@pytest.mark.parametrize("name, text", [("labels", LOSS), ("sequences", SEQUENCE_LOSS)], ids=["labels", "sequences"])
def test_a_loss_may_have_any_targets(
    tmp_path: Path, data_sets: dict[str, PreparedDataset], name: str, text: str
) -> None:
    try_settings(data_sets, name, *write_files(tmp_path, loss=text))


LAYERS = """from torch import nn


class First(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class Net(nn.Sequential):
    def __init__(self, shape, outputs):
        super().__init__(First(4, 4), nn.Linear(4, outputs))
"""
BAD_LAYERS = {
    "(super().forward(x), x)": r"the layer 0 returned a tuple; return one float tensor",
    "super().forward(x)[None]": r"for 8 samples, the layer 0 returned the shape \[1, 8, 4\]; return one row for each",
}


@pytest.mark.parametrize("outputs", BAD_LAYERS)
def test_layers_of_different_stages_must_pass_one_tensor(
    tmp_path: Path, data_sets: dict[str, PreparedDataset], outputs: str
) -> None:
    model, _ = write_files(tmp_path, LAYERS)
    try_settings(data_sets, "labels", model, "stages=2", schema=mnist_pipeline.Config)
    write_files(tmp_path, LAYERS.replace("super().forward(x)", outputs))
    with pytest.raises(UserError, match=BAD_LAYERS[outputs]):
        try_settings(data_sets, "labels", model, "stages=2", schema=mnist_pipeline.Config)


@pytest.mark.parametrize("settings", ["strategy=fsdp", "communication=powersgd"])
def test_scalar_parameters_are_refused_if_they_cannot_be_divided(
    tmp_path: Path, data_sets: dict[str, PreparedDataset], settings: str
) -> None:
    text = NETWORK.replace("self.layer(x)", "self.layer(x) * self.scale")
    layer = "self.layer = nn.Linear(4, outputs)\n"
    scale = "        self.scale = nn.Parameter(self.layer.weight.new_ones(()))\n"
    model, _ = write_files(tmp_path, text.replace(layer, layer + scale))
    try_settings(data_sets, "labels", model)
    with pytest.raises(UserError, match=r"the parameter scale is a scalar, .*; use a parameter of the shape \[1\]"):
        try_settings(data_sets, "labels", model, settings)


BAD_NETWORKS = {
    "class Other": ("class Net", r"has no class 'Net'; it has Other"),
    "class Net:\n    pass\n\n\nclass Unused": ("class Net", r"not a subclass of torch\.nn\.Module"),
    "self, shape)": (
        "self, shape, outputs)",
        r"takes 2 positional arguments but 3 were given; Class\(shape, outputs\)",
    ),
    "1 / 0": ("super().__init__()", r"net\.py:6: ZeroDivisionError: division by zero"),
    "nn.Linear(5,": ("nn.Linear(4,", r"net\.py:10: RuntimeError: .*mat1 and mat2 shapes cannot be multiplied"),
    "nn.Linear(4, 7)": (
        "nn.Linear(4, outputs)",
        r"net\.py:9: for 8 samples, forward returned the shape \[8, 7\]; .* needs \[8, 3\]",
    ),
    "(x), 1": ("(x)", r"net\.py:9: forward returned a tuple; return a float tensor"),
    "self.layer(x.T)": ("self.layer(x)", "net.py:10: RuntimeError"),
    "[nn.Linear(4, outputs)]\n        self.layer": ("nn.Linear(4, outputs)", "no trainable parameters"),
    "nn.Linear(4, outputs)\n        self.extra = nn.Linear(2, 2)": (
        "nn.Linear(4, outputs)",
        r"the parameter extra\.weight gets no gradient; .* or set find_unused_parameters=true",
    ),
    "nn.LazyLinear(outputs)": (
        "nn.Linear(4, outputs)",
        r"the sizes of the layer layer \(LazyLinear\) are unknown before the first forward pass; use a layer",
    ),
    "(x).detach()": ("(x)", r"net\.py:9: .*does not require grad"),
    "(": ("class Net", "net.py:4: SyntaxError"),
}


@pytest.mark.parametrize("replacement, case", BAD_NETWORKS.items(), ids=list(map(repr, BAD_NETWORKS)))
def test_a_bad_network_is_refused(
    tmp_path: Path, data_sets: dict[str, PreparedDataset], replacement: str, case: tuple[str, str]
) -> None:
    replaced, message = case
    assert replaced in NETWORK
    model, _ = write_files(tmp_path, NETWORK[::-1].replace(replaced[::-1], replacement[::-1], 1)[::-1])
    with pytest.raises(UserError, match=message) as caught:
        try_settings(data_sets, "labels", model)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(model)


def test_parameters_without_gradients_are_accepted_where_they_can_be_trained(
    tmp_path: Path, data_sets: dict[str, PreparedDataset]
) -> None:
    text = NETWORK.replace(
        "        super().__init__()", "        super().__init__()\n        self.extra = nn.Linear(2, 2)"
    )
    model, _ = write_files(tmp_path, text)
    try_settings(data_sets, "labels", model, "find_unused_parameters=true")
    if "local_sgd" in config.list_experiments():  # it has no DDP, and it can be deleted
        try_settings(data_sets, "labels", model, schema=config.import_schema("local_sgd"))


LOSSES = 'F.cross_entropy(outputs, targets, reduction="none")'
BAD_LOSSES = {
    f"{LOSSES}.mean()": r"loss\.py:loss: \S+loss\.py:4: the function returned a tensor of shape \[\] for 8 samples",
    f"{LOSSES}[:, None]": r"a tensor of shape \[8, 1\] for 8 samples",
    f"{LOSSES} / len(targets)": r"loss\.py:4: the loss of sample 0 depends on the other samples of the batch",
    f"{LOSSES}.detach()": r"loss\.py:4: the losses do not depend on the outputs",
    f"({LOSSES} - 1e9).sqrt()": r"loss\.py:4: the losses of the first samples contain NaN or infinity",
    f"{LOSSES}.mean().item()": "returned a float for 8 samples",
    "outputs + missing": r"loss\.py:5: NameError",
}


@pytest.mark.parametrize("body, message", BAD_LOSSES.items(), ids=list(BAD_LOSSES))
def test_a_bad_loss_is_refused(tmp_path: Path, data_sets: dict[str, PreparedDataset], body: str, message: str) -> None:
    _, loss = write_files(tmp_path, loss=LOSS.replace(LOSSES, body))
    with pytest.raises(UserError, match=message) as caught:
        try_settings(data_sets, "labels", loss)
    assert "\n" not in str(caught.value)


def test_a_column_of_outputs_that_is_broadcast_is_refused(
    tmp_path: Path, data_sets: dict[str, PreparedDataset]
) -> None:
    text = "def loss(outputs, targets):\n    return (outputs - targets).square().mean(1)\n"
    model, loss = write_files(tmp_path, loss=text)
    with pytest.raises(UserError, match=r"depends on the other samples .* \(outputs \[8, 1\], targets \[8\]\)"):
        try_settings(data_sets, "numbers", model, loss)


REFUSED_TARGETS = [
    ("numbers", ("model=mlp",), "loss=cross_entropy needs class labels, which .* does not have; use loss=mse or"),
    ("sequences", ("loss=mse",), "loss=mse needs float targets"),
    ("labels", ("loss=mse",), "loss=mse needs float targets, but .* are integers"),
    ("numbers", ("loss=mse", "checkpoint.best=test_accuracy"), "use checkpoint.best=test_loss"),
]


@pytest.mark.parametrize("name, settings, message", REFUSED_TARGETS)
def test_settings_that_do_not_suit_the_targets_are_refused(
    data_sets: dict[str, PreparedDataset], name: str, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        try_settings(data_sets, name, *settings)


def test_a_text_has_no_accuracy_by_which_the_best_checkpoint_could_be_chosen(
    data_sets: dict[str, PreparedDataset],
) -> None:
    text = replace(data_sets["labels"], name="text")
    settings = ["data.name=text", "model=net.py:Net"]
    cfg = config.load_config(mnist_pipeline.Config, [*settings, "checkpoint.best=test_loss"], {})
    custom_training.check_targets(cfg, text)
    cfg = config.load_config(mnist_pipeline.Config, [*settings, "checkpoint.best=test_accuracy"], {})
    with pytest.raises(UserError, match=r"data\.name=text does not have; use checkpoint\.best=test_loss"):
        custom_training.check_targets(cfg, text)


def test_only_a_sequence_of_layers_can_be_split_or_get_dropout(
    tmp_path: Path, data_sets: dict[str, PreparedDataset]
) -> None:
    model, _ = write_files(tmp_path)
    for schema in (mnist_pipeline.Config, resnet_modelparallel.Config):
        with pytest.raises(
            UserError, match=r"splits the network into stages, so the class must be a subclass of nn\.Seq"
        ):
            try_settings(data_sets, "labels", model, schema=schema)
    with pytest.raises(UserError, match=r"omit dropout, and add dropout layers .* depend on the number of ranks"):
        try_settings(data_sets, "labels", model, "dropout=0.5")


def test_a_missing_file_and_an_unknown_name_are_refused_without_data() -> None:
    cfg = config.load_config(ddp_multinode.Config, ["model=nowhere.py:Net"], {})
    with pytest.raises(UserError, match=r"model=nowhere\.py:Net: there is no file .*/nowhere\.py"):
        custom_training.check_files_of_config(cfg)
    for setting, choices in (("model=vgg", "mlp | convnet | resnet18 | resnet50 | FILE.py:Class"), ("loss=l1", "mse")):
        with pytest.raises(UserError, match="invalid value; allowed: ") as caught:
            config.load_config(ddp_multinode.Config, [setting], {})
        assert choices in str(caught.value)


def test_a_file_without_a_name_is_refused_with_the_names_that_it_defines(tmp_path: Path) -> None:
    model, loss = write_files(tmp_path)
    for setting, name in ((model, "Net"), (loss, "loss")):
        file_only = setting.rpartition(":")[0]
        with pytest.raises(UserError, match=rf"\.py: the name after the file is missing; the file has {name}; allowed"):
            config.load_config(ddp_multinode.Config, [file_only], {})


def test_the_check_runs_in_another_process(tmp_path: Path, data_sets: dict[str, PreparedDataset]) -> None:
    model, _ = write_files(tmp_path, NETWORK.replace("nn.Linear(4, outputs)", "nn.Linear(4, 7)"))
    cfg = config.load_config(ddp_multinode.Config, [model, "batch=8"], {})
    with pytest.raises(UserError, match=r"net\.py:9: for 8 samples, forward returned the shape \[8, 7\]"):
        custom_training.check_training(cfg, data_sets["labels"], None)
