"""common/data/own_data.py: what a user's function may return, and the one line for anything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.data import prepare
from common.data.loader import Images, Loader
from common.data.prepare import PreparedDataset
from common.system.errors import UserError
from configs.shared import Data

HEAD = """import numpy as np

X, Y = np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8), np.arange(40) % 3


"""


def prepared(place: Path, body: str, name: str = "f") -> PreparedDataset:
    """Prepare the set of a function `f(root)` with this body, in line 6 and after it."""
    (place / "own.py").write_text(f"{HEAD}def f(root):\n    {body}\n")
    return prepare.prepare_dataset(Data(name=f"{place}/own.py:{name}", root=str(place), cache=str(place / "sets")))


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("return 7", 6, "a value of type int; function(root) must return train images, train"),
        ("pass", 6, "the function returned None; function(root) must return"),
        ("return X, Y, X", 6, "the function returned a tuple of length 3; function(root) must"),
        ("return X.tolist(), Y, X, Y", 6, "the train images are a list of length 40; "),
        ("return X / 255, Y, X, Y", 6, "the train images have dtype float64; return uint8 values from 0 to 255"),
        ("return X[..., None], Y, X, Y", 6, "[40, 8, 8, 1]; return [N, H, W], [N, 3, H, W]"),
        ("return np.stack([X] * 3, 3), Y, X, Y", 6, "[40, 8, 8, 3]; return .*transpose(0, 3, 1, 2) moves the colors"),
        ("return X, Y[:3], X, Y", 6, "there are 40 train images but 3 train labels"),
        ("return X, Y, X, Y[:, None]", 6, "the test labels have dtype int64 and shape [40, 1]; return one integer"),
        ("return X, Y / 2, X, Y", 6, "the train labels have dtype float64"),
        ("return X, Y - 1, X, Y", 6, "the train labels range from -1 to 1; return labels from 0 to"),
        ("return X, Y * 5000, X, Y", 6, "the train labels range from 0 to 10000; return"),
        ("return X, Y, X[:0], Y[:0]", 6, "the test images are empty: their shape is [0, 8, 8]"),
        ("return X, Y, X, Y + 1", 6, "the largest test label is 3, but the largest train label is 2; every"),
        ("return X, Y, X[:, :4], Y", 6, "[8, 8], but each test image has shape [4, 8]; the shapes must"),
        ("return open(root / 'none')", 7, "FileNotFoundError: .*No such file"),
        ("raise SystemExit(0)", 7, "SystemExit: 0"),
        ("return X,\n    return", 6, "the function returned a tuple of length 1"),
        ("return (", 7, "SyntaxError: '(' was never closed"),
    ],
)
def test_what_cannot_be_trained_on_is_named_with_its_line(tmp_path: Path, body: str, line: int, words: str) -> None:
    with pytest.raises(UserError) as caught:
        prepared(tmp_path, body)
    told, at = str(caught.value), f"data.name={tmp_path}/own.py:f: {tmp_path}/own.py:{line}: "
    assert told.startswith(at) and "\n" not in told
    position = len(at)
    for part in words.split(".*"):
        position = told.index(part, position)
    assert not [path for path in (tmp_path / "sets").iterdir() if path.name != ".lock"]


def test_a_name_without_file_or_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no function 'g'; it has f"):
        prepared(tmp_path, "pass", "g")
    with pytest.raises(UserError, match=r"name an existing FILE.py:function, or use one of mnist, "):
        prepare.prepare_dataset(Data(name="nowhere.py:f", cache=str(tmp_path)))


@pytest.mark.parametrize("shape", [(8, 6), (3, 8, 6), (10,)], ids=str)
def test_images_and_vectors_are_stored_as_they_are_and_normalised(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 200, (40, *shape), dtype=np.uint8)
    if len(shape) == 3:
        x[:, 1] //= 3
        x[:, 2] = 9
    np.save(tmp_path / "x.npy", x)
    found = prepared(
        tmp_path, "x = np.asfortranarray(np.load(root / 'x.npy')); return x, Y.astype(np.uint64), x[:9], Y[:9]"
    )
    found.verify_checksums()
    train, test = Images(found, "train"), Images(found, "test")
    assert torch.equal(train.images, torch.from_numpy(x)) and train.images.is_contiguous()
    assert torch.equal(test.images, train.images[:9])
    assert train.labels.tolist() == [n % 3 for n in range(40)] and train.class_count == 3
    values = train.load_inputs(slice(None), torch.device("cpu"), torch.float64)
    for channel in values.unbind(1) if len(shape) == 3 else [values]:
        assert abs(channel.mean()) < 1e-9
        assert channel.std(correction=0).item() == pytest.approx(float(channel.min() != channel.max()))


def test_a_set_is_prepared_once_for_each_content_of_its_file(tmp_path: Path) -> None:
    body = "(root / 'calls').open('a').write('x'); return X, Y, X, Y"
    first, again = prepared(tmp_path, body), prepared(tmp_path, body)
    assert first == again and (tmp_path / "calls").read_text() == "x"
    other = prepared(tmp_path, body.replace("X, Y, X, Y", "X, Y, X[1:], Y[1:]"))
    assert other.path != first.path and (tmp_path / "calls").read_text() == "xx"
    (first.path / "statistics.json").unlink()
    with pytest.raises(UserError, match=f"{first.path} is damaged: the statistics file is missing; delete"):
        Images(first, "train")


def test_the_file_that_a_run_keeps_goes_first(tmp_path: Path) -> None:
    found = prepared(tmp_path, "return X, Y, X, Y")
    found.copy_user_data_file(tmp_path / "code")
    (tmp_path / "own.py").unlink()
    data = Data(name=found.name, root=str(tmp_path), cache=str(tmp_path / "sets"))
    assert prepare.prepare_dataset(data, code=tmp_path / "code") == found
    with pytest.raises(UserError, match="name an existing"):
        prepare.prepare_dataset(data)
    with pytest.raises(UserError, match="name an existing"):
        prepare.prepare_dataset(data, code=tmp_path)


def load_batches(found: PreparedDataset, augment: str) -> Loader:
    return Loader(Images(found, "train"), 20, 0, torch.device("cpu"), torch.float32, augment=augment)


def test_images_that_are_no_squares_are_augmented_and_vectors_are_not(tmp_path: Path) -> None:
    body = "return X.reshape(40, {0}), Y, X.reshape(40, {0}), Y"
    long = prepared(tmp_path, body.format("16, 4"))
    plain, changed = (torch.cat([x for x, _ in load_batches(long, kind)]) for kind in ("none", "crop_flip"))
    assert changed.shape == plain.shape == (40, 16, 4) and not torch.equal(plain, changed)
    with pytest.raises(UserError, match=r"data\.augment=crop requires images, but this data set contains vectors; "):
        load_batches(prepared(tmp_path, body.format("64")), "crop")
