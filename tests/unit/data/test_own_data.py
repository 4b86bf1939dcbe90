"""Custom data sets: arrays that a user's function may return, and refusals in one line."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from common.data import prepare
from common.data.loader import Loader
from common.data.prepare import PreparedDataset
from common.data.samples import Images
from common.system.errors import UserError
from configs.shared import Data

HEAD = """import numpy as np

X, Y = np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8), np.arange(40) % 3


"""


def prepare_function(folder: Path, body: str, name: str = "f") -> PreparedDataset:
    """Prepare the set of a function `f(root)`, defined in line 6; `body` begins in line 7."""
    (folder / "own.py").write_text(f"{HEAD}def f(root):\n    {body}\n")
    settings = Data(name=f"{folder}/own.py:{name}", root=str(folder), cache=str(folder / "sets"))
    return prepare.prepare_dataset(settings)


INVALID_FUNCTIONS = {
    "return 7": "6: a value of type int; function(root) must return train inputs, train",
    "pass": "6: the function returned None; function(root) must return",
    "return X, Y, X": "6: the function returned a tuple of length 3; function(root) must",
    "return X.tolist(), Y, X, Y": "6: the train inputs are a list of length 40; ",
    "return X.astype(int), Y, X, Y": "6: the train inputs have dtype int64; return pixels as uint8 values from 0",
    "return X / 255, Y, X, Y": "6: the train inputs are stored as float32, but the test inputs as uint8",
    "return X / (X - X), Y, X, Y": "6: the train inputs contain NaN or infinity, first in sample 0",
    "return X, Y / (Y - 2), X, Y": "6: the train targets contain NaN or infinity, first in sample 2",
    "return X, Y > 1, X, Y": "6: the train targets have dtype bool; return integers",
    "return X[..., None], Y, X, Y": "6: [40, 8, 8, 1]; return [N, H, W], [N, 3, H, W]",
    "return np.stack([X] * 3, 3), Y, X, Y": "6: [40, 8, 8, 3]; return .*transpose(0, 3, 1, 2) moves the colors",
    "return X, Y[:3], X, Y": "6: there are 40 train inputs but 3 train targets",
    "return X, Y, X, Y[:, None]": "6: each train target has shape [], but each test target has shape [1]",
    "return X, Y / 2, X, Y": "6: the train targets are stored as float32, but the test targets as int32",
    "return X, Y - 1, X, Y": "6: the train labels range from -1 to 1; return labels from 0 to",
    "return X, Y * 5000, X, Y": "6: the train labels range from 0 to 10000; return",
    "return X, Y, X[:0], Y[:0]": "6: the test inputs are empty: their shape is [0, 8, 8]",
    "return X, Y, X, Y + 1": "6: the largest test label is 3, but the largest train label is 2; every",
    "return X, Y, X[:, :4], Y": "6: [8, 8], but each test input has shape [4, 8]; the shapes must",
    "return open(root / 'none')": "7: FileNotFoundError: .*No such file",
    "raise SystemExit(0)": "7: SystemExit: 0",
    "return X,\n    return": "6: the function returned a tuple of length 1",
    "return (": "7: SyntaxError: '(' was never closed",
}


@pytest.mark.parametrize("body, expected", INVALID_FUNCTIONS.items())
def test_invalid_data_is_refused_with_its_line(tmp_path: Path, body: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        prepare_function(tmp_path, body)
    message = str(caught.value)
    line, _, parts = expected.partition(": ")
    prefix = f"data.name={tmp_path}/own.py:f: {tmp_path}/own.py:{line}: "
    assert message.startswith(prefix)
    assert "\n" not in message
    position = len(prefix)
    for part in parts.split(".*"):
        position = message.index(part, position)
    assert {path.name for path in (tmp_path / "sets").iterdir()} <= {".lock"}


def test_a_name_without_file_or_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no function 'g'; it has f"):
        prepare_function(tmp_path, "pass", "g")
    with pytest.raises(UserError, match=r"name an existing FILE.py:function, or use one of mnist, "):
        prepare.prepare_dataset(Data(name="nowhere.py:f", cache=str(tmp_path)))


@pytest.mark.parametrize("shape", [(8, 6), (3, 8, 6), (10,)], ids=str)
def test_images_and_vectors_are_stored_unchanged_and_normalized(tmp_path: Path, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 200, (40, *shape), dtype=np.uint8)
    if len(shape) == 3:
        pixels[:, 1] //= 3
        pixels[:, 2] = 9
    np.save(tmp_path / "x.npy", pixels)
    body = "x = np.asfortranarray(np.load(root / 'x.npy')); return x, Y.astype(np.uint64), x[:9], Y[:9]"
    prepared = prepare_function(tmp_path, body)
    prepared.verify_checksums()
    train_set = Images(prepared, "train")
    test_set = Images(prepared, "test")
    assert torch.equal(train_set.images, torch.from_numpy(pixels))
    assert train_set.images.is_contiguous()
    assert torch.equal(test_set.images, train_set.images[:9])
    assert train_set.labels.tolist() == [number % 3 for number in range(40)]
    assert train_set.outputs == 3

    inputs = train_set.load_inputs(slice(None), torch.device("cpu"), torch.float64)
    for channel in inputs.unbind(1) if len(shape) == 3 else [inputs]:
        deviation = 0.0 if channel.min() == channel.max() else 1.0
        assert abs(channel.mean()) < 1e-9
        assert channel.std(correction=0).item() == pytest.approx(deviation)


@pytest.mark.parametrize("shape", [(8, 6), (4, 3, 2, 5), ()], ids=str)
def test_float_inputs_and_targets_are_used_unchanged(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(100, 9, (40, *shape))
    np.save(tmp_path / "x.npy", values)
    prepared = prepare_function(tmp_path, "x = np.load(root / 'x.npy'); return x, x / 2, x[:9], x[:9] / 2")
    train_set = Images(prepared, "train")
    expected = torch.from_numpy(values.astype(np.float32))
    for dtype in (torch.float32, torch.float64):
        inputs = train_set.load_inputs(slice(3, 30), torch.device("cpu"), dtype)
        assert torch.equal(inputs, expected[3:30].to(dtype))
        assert inputs.data_ptr() != train_set.images[3:].data_ptr(), "a network may change its inputs in place"
        targets = train_set.load_targets(torch.tensor([7, 2]), torch.device("cpu"), dtype)
        assert targets.dtype == dtype
        assert targets.tolist() == (expected / 2)[[7, 2]].tolist()
    assert not train_set.has_labels
    assert train_set.outputs == math.prod(shape)
    assert prepared.target_kind == "floats"


def test_float_inputs_cannot_be_augmented(tmp_path: Path) -> None:
    prepared = prepare_function(tmp_path, "return X / 255, Y, X / 255, Y")
    with pytest.raises(UserError, match="requires images, but this data set contains float inputs; omit"):
        load_inputs(prepared, "crop")


def test_a_set_is_prepared_once_for_each_content_of_its_file(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    body = "(root / 'calls').open('a').write('x'); return X, Y, X, Y"
    prepared = prepare_function(tmp_path, body)
    assert prepare_function(tmp_path, body) == prepared
    assert calls.read_text() == "x"
    changed = prepare_function(tmp_path, body.replace("X, Y, X, Y", "X, Y, X[1:], Y[1:]"))
    assert changed.path != prepared.path
    assert calls.read_text() == "xx"


def test_a_prepared_set_without_statistics_is_damaged(tmp_path: Path) -> None:
    prepared = prepare_function(tmp_path, "return X, Y, X, Y")
    (prepared.path / "statistics.json").unlink()
    with pytest.raises(UserError, match=f"{prepared.path} is damaged: the statistics file is missing; delete"):
        Images(prepared, "train")


def test_the_copy_in_a_run_replaces_a_missing_file(tmp_path: Path) -> None:
    prepared = prepare_function(tmp_path, "return X, Y, X, Y")
    prepared.copy_user_files(tmp_path / "code")
    (tmp_path / "own.py").unlink()
    settings = Data(name=prepared.name, root=str(tmp_path), cache=str(tmp_path / "sets"))
    assert prepare.prepare_dataset(settings, code=tmp_path / "code") == prepared
    with pytest.raises(UserError, match="name an existing"):
        prepare.prepare_dataset(settings)
    with pytest.raises(UserError, match="name an existing"):
        prepare.prepare_dataset(settings, code=tmp_path)


def load_inputs(prepared: PreparedDataset, augment: str) -> torch.Tensor:
    images = Images(prepared, "train")
    loader = Loader(images, 20, 0, torch.device("cpu"), torch.float32, augment=augment)
    return torch.cat([inputs for inputs, _ in loader])


RESHAPED = "return X.reshape(40, {0}), Y, X.reshape(40, {0}), Y"


def test_rectangular_images_are_augmented(tmp_path: Path) -> None:
    prepared = prepare_function(tmp_path, RESHAPED.format("16, 4"))
    original = load_inputs(prepared, "none")
    augmented = load_inputs(prepared, "crop_flip")
    assert original.shape == (40, 16, 4)
    assert augmented.shape == (40, 16, 4)
    assert not torch.equal(original, augmented)


def test_vectors_cannot_be_augmented(tmp_path: Path) -> None:
    prepared = prepare_function(tmp_path, RESHAPED.format("64"))
    with pytest.raises(UserError, match=r"data\.augment=crop requires images, but this data set contains vectors; "):
        load_inputs(prepared, "crop")
