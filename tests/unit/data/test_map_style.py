"""Map-style data sets: samples are read on demand, in the same order and with the same random choices as planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from common.data import own_data, prepare, preprocessing
from common.data.loader import Loader
from common.data.prepare import PreparedDataset
from common.data.samples import Images, open_samples
from common.system.errors import UserError
from configs.shared import Data

DATA = """import torch


class Set:
    classes = ["low", "high"]

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def get(self, index, generator):
        return torch.rand(3, 2, generator=generator) + index, index % 2


def load(root):
    return Set(50), Set(20)
"""


def prepare_text(folder: Path, text: str) -> PreparedDataset:
    (folder / "own.py").write_text(text)
    settings = Data(name=f"{folder}/own.py:load", root=str(folder), cache=str(folder / "sets"))
    return prepare.prepare_dataset(settings)


@pytest.fixture
def train_set(tmp_path: Path) -> Images:
    return open_samples(prepare_text(tmp_path, DATA), "train")


Batches = list[tuple[list[Any], list[int]]]


def list_batches(loader: Loader) -> Batches:
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in loader]


def make_loader(train_set: Images, **options: Any) -> Loader:
    return Loader(train_set, 8, 0, torch.device("cpu"), torch.float64, block=2, **options)


def test_a_sample_is_read_when_it_is_needed(train_set: Images) -> None:
    assert len(train_set) == 50
    assert train_set.shape == (3, 2)
    assert train_set.outputs == 2
    inputs = train_set.load_inputs(slice(4, 7), torch.device("cpu"), torch.float32)
    assert inputs.floor().amin((1, 2)).tolist() == [4, 5, 6]
    rows = torch.tensor([6, 4])
    assert torch.equal(train_set.load_inputs(rows, torch.device("cpu"), torch.float32), inputs[[2, 0]])
    assert train_set.load_targets(rows, torch.device("cpu")).tolist() == [0, 0]


READING_DATA = """import torch


class Constant:
    classes = ["low", "high"]

    def __init__(self, value):
        self.value = value

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((2,), self.value), index % 2


def load(root):
    value = float((root / "value").read_text())
    return Constant(value), Constant(value)
"""


def test_moved_data_has_the_same_checksum_and_is_read_from_its_new_folder(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(READING_DATA)
    old = tmp_path / "old"
    old.mkdir()
    (old / "value").write_text("7")
    settings = Data(name=f"{tmp_path}/own.py:load", root=str(old), cache=str(tmp_path / "sets"))
    prepared = prepare.prepare_dataset(settings)
    moved = old.rename(tmp_path / "new")
    prepared_again = prepare.prepare_dataset(dataclasses.replace(settings, root=str(moved)))
    assert prepared_again.sha256 == prepared.sha256
    inputs = open_samples(prepared_again, "train").load_inputs(slice(0, 4), torch.device("cpu"), torch.float32)
    assert inputs.unique().tolist() == [7]


def test_the_description_replaces_the_arrays(tmp_path: Path) -> None:
    prepared = prepare_text(tmp_path, DATA)
    assert prepare_text(tmp_path, DATA) == prepared
    prepared.verify_checksums()
    assert prepared.target_kind == "labels"
    assert preprocessing.list_class_names(prepared, 2) == ["low", "high"]
    assert preprocessing.describe_preprocessing(prepared, (3, 2))["formula"] == "input = value"
    assert len(open_samples(prepared, "test", 7)) == 7


def test_epochs_draw_different_random_choices_and_all_samples(train_set: Images) -> None:
    loader = make_loader(train_set, drop_last=False)
    epochs = [list_batches(loader), list_batches(loader)]
    numbers = []
    for batches in epochs:
        inputs = torch.cat([torch.tensor(x) for x, _ in batches])
        assert sorted(inputs.floor().amin((1, 2)).tolist()) == list(range(50))
        numbers.append(inputs.frac().flatten().sort().values)
    first, second = numbers
    assert not torch.allclose(first, second, atol=1e-4), "each epoch draws new random numbers"


def test_workers_shards_and_a_resume_do_not_change_a_sample(train_set: Images) -> None:
    expected = list_batches(make_loader(train_set))
    assert list_batches(make_loader(train_set, workers=2)) == expected

    resumed = make_loader(train_set)
    resumed.load_state_dict({"epoch": 0, "position": 24})
    assert list_batches(resumed) == expected[3:]

    shards = []
    for rank in range(2):
        shards.append(list_batches(make_loader(train_set, shard=(rank, 2), weights=(3, 1))))
    joined = [(first[0] + second[0], first[1] + second[1]) for first, second in zip(*shards, strict=True)]
    assert joined == expected
    empty = next(iter(make_loader(train_set, shard=(0, 2), weights=(0, 1))))
    assert [part.shape for part in empty] == [(0, 3, 2), (0,)]


def test_the_targets_of_an_empty_shard_have_the_shape_of_a_target(tmp_path: Path) -> None:
    text = DATA.replace("index % 2", "torch.full((2, 4), 0.5)")
    train_set = open_samples(prepare_text(tmp_path, text), "train")
    _, targets = next(iter(make_loader(train_set, shard=(0, 2), weights=(0, 1))))
    assert targets is not None
    assert targets.shape == (0, 2, 4)
    assert targets.dtype == torch.float64


def test_a_stage_may_need_only_the_targets(train_set: Images) -> None:
    inputs, targets = next(iter(make_loader(train_set, inputs=False)))
    assert inputs is None
    assert targets.tolist() == list_batches(make_loader(train_set))[0][1]


RANDOM = "torch.rand(3, 2, generator=generator)"
INVALID = {
    "Set(50), [1, 2]": ("Set(50), Set(20)", "sample 0 is a value of type int; return a tuple (input, target)"),
    "(Set(50),)": ("Set(50), Set(20)", "the function returned a tuple of length 1"),
    "def length": ("def __len__", "the train data set has no __len__"),
    "def read": ("def get", "the train data set has neither __getitem__(index) nor get(index, generator)"),
    "Set(0), Set(20)": ("Set(50), Set(20)", "the train data set is empty"),
    "torch.rand(3, 2)": (RANDOM, "two different values for sample 0; define get(index, generator)"),
    "torch.zeros(3, 2 + index)": (RANDOM, "the samples 0 and 1 have different shapes"),
    "torch.full((3, 2), float('nan'))": (RANDOM, "sample 0 contains NaN or infinity"),
    "torch.zeros(3, dtype=int)": (RANDOM, "the input of sample 0 has dtype torch.int64; return float32"),
    "    names =": ("    classes =", "set `classes` of the train data set to the list of class names"),
    "1 / 0": ("index % 2", "own.py:14: ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("replacement, case", INVALID.items(), ids=list(INVALID))
def test_invalid_data_sets_are_refused_with_their_line(tmp_path: Path, replacement: str, case: tuple[str, str]) -> None:
    replaced, message = case
    assert replaced in DATA
    file = tmp_path / "own.py"
    file.write_text(DATA.replace(replaced, replacement))
    with pytest.raises(UserError) as caught:
        own_data.write_custom_data(f"{file}:load", tmp_path, [tmp_path / "part.npy"])
    text = str(caught.value)
    assert text.startswith(f"data.name={file}:load: {file}:")
    assert message in text
    assert "\n" not in text
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("value", ["+ index", "index % 2"], ids=["input", "target"])
def test_a_sample_with_nan_is_refused_while_training(tmp_path: Path, value: str) -> None:
    text = DATA.replace(value, f"{value} + (float('nan') if index == 31 else 0.0)")
    train_set = open_samples(prepare_text(tmp_path, text), "train")
    with pytest.raises(UserError, match=r"own\.py:13: sample 31 contains NaN or infinity; remove such samples"):
        train_set.load_inputs(slice(30, 32), torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match=r"own\.py:13: sample 31 contains NaN"):
        list_batches(make_loader(train_set, workers=1))


def test_a_changed_length_and_a_bad_sample_are_refused_while_training(tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("50")
    text = DATA.replace("Set(50), Set", "Set(int((root / 'count').read_text())), Set")
    prepared = prepare_text(tmp_path, text.replace("index % 2", "index if index > 40 else index % 2"))
    train_set = open_samples(prepared, "train")
    with pytest.raises(UserError) as caught:
        train_set.load_inputs(slice(41, 43), torch.device("cpu"), torch.float32)
    file = tmp_path / "own.py"
    assert str(caught.value).startswith(f"data.name={file}:load: {file}:13: the label of sample 41 is 41; expected 0")
    count.write_text("49")
    with pytest.raises(UserError, match="has 49 samples, but had 50 when it was prepared; delete"):
        open_samples(prepared, "train")
