"""The data: byte-identical digits, balanced; order and position; ragged ends; exact evaluation."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import itertools
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.data import loader as data
from common.data import prepare, sources, synthetic_digits
from common.system.errors import UserError
from configs.batch_plan import divide_batch
from configs.shared import Data


@pytest.fixture(scope="module")
def images(cache: Path) -> data.Images:
    return data.Images(prepare.prepare_digits(cache), "train", limit=1000)


def loader(images: data.Images, **settings: int) -> data.Loader:
    keywords = {"batch": 64, "seed": 0, "block": 4, "workers": 0} | settings
    batch, seed = keywords.pop("batch"), keywords.pop("seed")
    return data.Loader(images, batch, seed, torch.device("cpu"), torch.float32, **keywords)  # type: ignore[arg-type]


def batches(source: data.Loader) -> list[tuple[bytes, list[int]]]:
    return [(x.numpy().tobytes(), y.tolist()) for x, y in source if x is not None and y is not None]


def test_digits_are_the_same_bytes_for_a_seed_and_balanced() -> None:
    first, labels = synthetic_digits.generate_digits(503, seed=5, part="train")
    again, _ = synthetic_digits.generate_digits(503, seed=5, part="train")
    other, _ = synthetic_digits.generate_digits(503, seed=6, part="train")
    test, _ = synthetic_digits.generate_digits(503, seed=5, part="test")
    assert first.shape == (503, 28, 28) and first.dtype == labels.dtype == np.uint8
    assert first.tobytes() == again.tobytes()
    assert len({part.tobytes() for part in (first, other, test)}) == 3
    counts = np.bincount(labels, minlength=10)
    assert np.ptp(counts) <= 1
    assert len({image.tobytes() for image in first}) == 503
    golden = "4521573852bd00512be622ea9cfc150bab4a1061363f32ba2f19302adadfeec8"
    assert hashlib.sha256(first.tobytes()).hexdigest() == golden, "the set changed: raise prepare.DIGITS_VERSION"


def test_statistics_are_those_of_the_digits(cache: Path) -> None:
    pixels = prepare.prepare_digits(cache).map_array("train_images")
    assert pixels.shape == (60_000, 28, 28)
    counts = sum(np.bincount(part.ravel(), minlength=256) for part in np.array_split(pixels, 60))
    values = np.arange(256) / 255
    mean = np.average(values, weights=counts)
    deviation = np.sqrt(np.average((values - mean) ** 2, weights=counts))
    assert (mean, deviation) == pytest.approx(data.STATISTICS["digits"], abs=1e-4)


def test_order_is_a_function_of_seed_and_epoch(images: data.Images) -> None:
    first = data.draw_sample_order(1000, 0, 0)
    assert sorted(first) == list(range(1000))
    assert (first == data.draw_sample_order(1000, 0, 0)).all()
    assert (first != data.draw_sample_order(1000, 0, 1)).any() and (first != data.draw_sample_order(1000, 1, 0)).any()
    assert batches(loader(images, block=1)) == batches(loader(images, block=7))


def test_a_restored_position_gives_the_rest_of_the_epoch(images: data.Images) -> None:
    whole = loader(images)
    everything = batches(whole) + batches(whole)
    assert whole.state_dict() == {"epoch": 2, "position": 0}
    interrupted = loader(images)
    iterator = iter(interrupted)
    for _ in range(5):
        next(iterator)
    resumed = loader(images)
    resumed.load_state_dict(interrupted.state_dict())
    assert resumed.state_dict() == {"epoch": 0, "position": 5 * 64}
    assert batches(resumed) + batches(resumed) == everything[5:]


def test_ragged_rest_of_an_epoch_is_left_out_and_is_another_one_each_time(images: data.Images) -> None:
    source = loader(images)
    first, second = batches(source), batches(source)
    assert len(first) == len(second) == 1000 // 64 == source.steps
    assert all(len(labels) == 64 for _, labels in first)
    left_out = [set(data.draw_sample_order(1000, 0, epoch)[15 * 64 :]) for epoch in (0, 1)]
    assert len(left_out[0]) == 40 and left_out[0] != left_out[1]


def test_inputs_are_normalised_like_torchvision(images: data.Images) -> None:
    from PIL import Image
    from torchvision import transforms

    mean, std = data.STATISTICS["digits"]
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mean,), (std,))])
    ours = images.load_inputs(torch.arange(5), torch.device("cpu"), torch.float32)
    for i in range(5):
        expected = theirs(Image.fromarray(images.images[i].numpy()))[0]
        assert torch.allclose(ours[i], expected, atol=1e-6)


def test_prepared_once_by_processes_that_start_together(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def small() -> sources.Arrays:
        with open(made, "a") as file:
            file.write("x")
        time.sleep(0.3)  # long enough for the others to find nothing there
        return (*synthetic_digits.generate_digits(50, 0, "train"), *synthetic_digits.generate_digits(20, 0, "test"))

    def body() -> None:
        prepare.find_or_store_arrays(tmp_path / "cache", "digits", "small", small).verify_checksums()

    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=body) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert made.read_text() == "x"


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A small MNIST in torchvision's layout; sizes are those of MNIST_FILES scaled down by the test."""
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    train, test = synthetic_digits.generate_digits(100, 1, "train"), synthetic_digits.generate_digits(50, 1, "test")
    for prefix, (pixels, labels) in (("train", train), ("t10k", test)):
        count = len(labels)
        header = np.array([0x803, count, 28, 28], ">i4").tobytes()
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            np.array([0x801, count], ">i4").tobytes() + labels.tobytes()
        )
    return folder


def test_mnist_comes_through_torchvision(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MNIST_FILES", {file.name: file.stat().st_size for file in raw.iterdir()})
    settings = Data(root=str(tmp_path), cache=str(tmp_path / "cache"))
    found = prepare.prepare_dataset(settings)
    assert found.name == "mnist" and not found.notice
    assert (found.map_array("train_images") == synthetic_digits.generate_digits(100, 1, "train")[0]).all()
    assert (found.map_array("test_labels") == synthetic_digits.generate_digits(50, 1, "test")[1]).all()
    shutil.copy(raw / "t10k-labels-idx1-ubyte", raw / "kept")
    (raw / "t10k-labels-idx1-ubyte").write_bytes(b"short")
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte is damaged: 5 bytes"):
        prepare.prepare_dataset(settings)
    (raw / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="t10k-labels-idx1-ubyte is missing"):
        prepare.prepare_dataset(settings)


def test_only_the_default_folder_may_be_missing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path / "mistyped")
    settings = Data(root=root, cache=str(cache), download_timeout=0)
    with pytest.raises(UserError, match=f"data.root={root}: the folder does not exist; .* or set data.name=digits"):
        prepare.prepare_dataset(settings)
    held = Data(root=str(tmp_path), cache=str(cache), download_timeout=0)
    with pytest.raises(UserError, match=f"MNIST is not in the folder {tmp_path} .*; set data.root to .*MNIST/raw"):
        prepare.prepare_dataset(held)
    monkeypatch.setenv("DATA_ROOT", root)
    found = prepare.prepare_dataset(settings)
    assert found.name == "digits" and "training on the built-in digits set instead" in found.notice
    assert not Path(root).exists()


def test_a_missing_mnist_is_downloaded_once(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a mirror on this machine, whose files are smaller than the real ones."""
    from torchvision.datasets import MNIST

    files = {f"{file.name}.gz": gzip.compress(file.read_bytes()) for file in raw.iterdir()}
    resources = [(name, hashlib.md5(packed).hexdigest()) for name, packed in files.items()]
    asked: list[str] = []

    class Mirror(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(files[self.path.strip("/")])

        do_HEAD = do_GET

        def log_message(self, *words: object) -> None:
            pass

    monkeypatch.setattr(sources, "MNIST_FILES", {file.name: file.stat().st_size for file in raw.iterdir()})
    monkeypatch.setattr(MNIST, "resources", resources)
    (tmp_path / "new").mkdir()
    settings = Data(root=str(tmp_path / "new"), cache=str(tmp_path / "cache"), download_timeout=20)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(MNIST, "mirrors", [address])
        monkeypatch.setattr(prepare, "MNIST_MIRROR", address + resources[0][0])
        found = prepare.prepare_dataset(settings)
        assert found.name == "mnist" and not found.notice
        assert (found.map_array("train_images") == synthetic_digits.generate_digits(100, 1, "train")[0]).all()
        before = list(asked)
        assert prepare.prepare_dataset(settings) == found and asked == before
        server.shutdown()
    assert not list((tmp_path / "new").glob(".download-*"))
    held = Data(root=str(tmp_path), cache=str(tmp_path / "cache"), download_timeout=20)
    shutil.rmtree(raw)
    with pytest.raises(UserError, match=r"MNIST .* cannot be downloaded \(no connection: .*refused"):
        prepare.prepare_dataset(held)


def test_changed_raw_files_are_prepared_anew(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MNIST_FILES", {file.name: file.stat().st_size for file in raw.iterdir()})
    settings = Data(root=str(tmp_path), cache=str(tmp_path / "cache"))
    first = prepare.prepare_dataset(settings)
    file = raw / "train-labels-idx1-ubyte"
    changed = bytearray(file.read_bytes())
    changed[-1] = (changed[-1] + 1) % 10
    file.write_bytes(changed)
    second = prepare.prepare_dataset(settings)
    assert first.sha256["train_labels"] != second.sha256["train_labels"]
    assert first.sha256["train_images"] == second.sha256["train_images"]


def test_checksums_are_those_of_the_files(cache: Path) -> None:
    found = prepare.prepare_digits(cache)
    file = found.path / "test_labels.npy"
    assert found.sha256["test_labels"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert os.access(found.path, os.R_OK)


def test_workers_hand_out_the_same_batches_from_any_position(images: data.Images) -> None:
    alone, helped = loader(images), loader(images, workers=2)
    for source in (alone, helped):
        source.load_state_dict({"epoch": 3, "position": 5 * 64})
    assert batches(helped) == batches(alone) and len(batches(loader(images))) == 15
    assert helped.state_dict() == alone.state_dict() == {"epoch": 4, "position": 0}


def ragged(images: data.Images, share: tuple[int, int] = (0, 1), **settings: Any) -> data.Loader:
    keywords: dict[str, Any] = {"block": 4, "drop_last": False} | settings
    return data.Loader(images, 64, 0, torch.device("cpu"), torch.float32, shard=share, **keywords)


def test_a_ragged_last_batch_is_shared_as_evenly_as_it_can_be(images: data.Images) -> None:
    whole, parts = ragged(images), [ragged(images, (rank, 4)) for rank in range(4)]
    assert whole.steps == 16 and len(images) == 15 * 64 + 40
    rest = data.Images.__new__(data.Images)
    rest.__dict__ |= images.__dict__ | {"images": images.images[: 64 + 2], "labels": images.labels[: 64 + 2]}
    everything = [y.tolist() for _, y in whole]
    assert [len(y) for y in everything] == [64] * 15 + [40]
    assert sorted(itertools.chain(*everything)) == sorted(images.labels.tolist())
    shared = [[y.tolist() for _, y in part] for part in parts]
    assert [list(itertools.chain(*pieces)) for pieces in zip(*shared, strict=True)] == everything
    sizes = [[(len(y), loader.size) for _, y in loader] for loader in (ragged(rest, (rank, 4)) for rank in range(4))]
    assert sizes == [[(16, 64), (1, 2)]] * 2 + [[(16, 64), (0, 2)]] * 2
    later = ragged(images)
    later.load_state_dict({"epoch": 0, "position": 15 * 64})
    assert [y.tolist() for _, y in later] == everything[15:]
    assert later.state_dict() == {"epoch": 1, "position": 0}


def test_an_image_changes_by_its_place_alone(images: data.Images) -> None:
    def pixels(**settings: Any) -> torch.Tensor:
        source = ragged(images, augment="crop_flip", **settings)
        source.load_state_dict({"epoch": 2, "position": 0})
        return torch.cat([x for x, _ in source])

    stream = torch.get_rng_state()
    changed = pixels()
    assert torch.equal(stream, torch.get_rng_state()), "dropout's stream goes on as without"
    assert torch.equal(changed, pixels(block=1)) and torch.equal(changed, pixels(workers=2))
    halves = [ragged(images, (rank, 2), augment="crop_flip") for rank in range(2)]
    for half in halves:
        half.load_state_dict({"epoch": 2, "position": 7 * 64})
    later = [torch.cat(pair) for pair in zip(*[[x for x, _ in half] for half in halves], strict=True)]
    assert torch.equal(torch.cat(later), changed[7 * 64 :])
    plain = ragged(images)
    plain.load_state_dict({"epoch": 2, "position": 0})
    unchanged = torch.cat([x for x, _ in plain])
    same = (changed.flatten(1) == unchanged.flatten(1)).all(1)
    assert same.double().mean() < 0.1
    again = ragged(images, augment="crop_flip")
    again.load_state_dict({"epoch": 3, "position": 0})
    rows = [data.draw_sample_order(1000, 0, epoch).argsort()[5] for epoch in (2, 3)]
    assert not torch.equal(torch.cat([x for x, _ in again])[rows[1]], changed[rows[0]]), "another epoch, another change"
    shifted = changed[rows[0]].sort().values  # only whole pixels move, and mirrored images are the same pixels
    assert torch.isin(shifted, torch.cat([unchanged[rows[0]].flatten(), unchanged.min()[None]])).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_change_between_two_batches_and_the_batches_do_not(workers: int, images: data.Images) -> None:
    whole = [y.tolist() for _, y in ragged(images, block=3)]
    plan = {0: (32, 16, 16), 2: (64, 0, 0), 3: (1, 40, 23), 9: (0, 2, 62)}  # from which batch on, samples of each rank
    parts = [ragged(images, (rank, 3), block=3, workers=workers, weights=(1, 1, 1)) for rank in range(3)]
    taken = list[list[list[int]]]()
    for rank, part in enumerate(parts):
        part.set_shards(rank, plan[0])
        taken.append([])
        for number, (_, y) in enumerate(part, 1):
            taken[-1].append(y.tolist())
            if number in plan:
                part.set_shards(rank, plan[number])
        assert part.state_dict() == {"epoch": 1, "position": 0}
    assert [list(itertools.chain(*pieces)) for pieces in zip(*taken, strict=True)] == whole
    sizes = [tuple(map(len, pieces)) for pieces in zip(*taken, strict=True)]
    full = [max((at for at in plan if at <= number), default=0) for number in range(15)]
    assert sizes == [*(plan[at] for at in full), (0, 1, 39)], "40 samples in the last, partial batch"
    with pytest.raises(ValueError, match="do not add up"):
        parts[0].set_shards(0, (64, 1, 0))


def test_a_loader_goes_back_to_a_batch_while_it_is_read(images: data.Images) -> None:
    """As after a step that failed and is taken again, by fewer ranks."""
    whole = [y.tolist() for _, y in loader(images)]
    source = loader(images)
    got = list[list[int]]()
    for _, y in source:
        got.append(y.tolist())
        if len(got) == 6:
            source.load_state_dict({"epoch": 0, "position": 5 * 64})
    assert got == whole[:6] + whole[5:]


@pytest.mark.parametrize(
    ("batch", "weights", "counts"),
    [
        (24, (3, 1), (18, 6)),
        (24, (5, 2, 1), (15, 6, 3)),
        (10, (1, 1, 1), (4, 3, 3)),
        (2, (1, 1, 1), (1, 1, 0)),
        (7, (2, 0, 1), (5, 0, 2)),
        (1, (1, 3), (0, 1)),
        (0, (1, 3), (0, 0)),
    ],
)
def test_a_batch_is_cut_in_proportion_to_the_weights(
    batch: int, weights: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    assert divide_batch(batch, weights) == counts
