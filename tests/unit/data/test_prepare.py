"""Sets prepared from files: image folders, CIFAR-10, and generated images."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import multiprocessing
import os
import pickle
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common.data import prepare, sources
from common.runs import progress
from common.system.causes import Cause
from common.system.errors import UserError
from configs.shared import Data, Log
from tests.harness.file_limit import limit_file_size
from tests.harness.images import load_train_test


def test_generated_images_are_labelled_as_such(tmp_path: Path) -> None:
    settings = Data(name="generated", cache=str(tmp_path), samples=50, image_size=16, classes=7)
    found = prepare.prepare_dataset(settings)
    assert found.name == "generated" and "only to measure throughput" in found.notice
    train_set, test_set = load_train_test(found, settings)
    assert train_set.shape == (3, 16, 16) and train_set.class_count == 7 and len(test_set) == 10
    x = train_set.load_inputs(slice(0, 50), torch.device("cpu"), torch.float64)
    assert abs(x.mean().item()) < 0.05 and abs(x.std().item() - 1) < 0.05


def test_missing_cifar10_is_refused_naming_what_would_do(tmp_path: Path) -> None:
    settings = Data(name="cifar10", root=str(tmp_path), cache=str(tmp_path / "cache"), download_timeout=0)
    with pytest.raises(UserError, match=r"CIFAR-10 is not in the folder .*data\.name=generated"):
        prepare.prepare_dataset(settings)
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"corrupted.*delete .*data\.name=generated"):
        prepare.prepare_dataset(settings)


def test_cifar10_comes_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)

    def write(name: str, content: Any) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    train_file = write("data_batch_1", {"data": pixels[:15], "labels": list(range(10)) + [0] * 5})
    test_file = write("test_batch", {"data": pixels[15:], "labels": [9, 8, 7, 6, 5]})
    name, md5 = write("batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", [train_file])
    monkeypatch.setattr(CIFAR10, "test_list", [test_file])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    settings = Data(name="cifar10", root=str(tmp_path), cache=str(tmp_path / "cache"))
    with limit_file_size(9), pytest.raises(UserError, match="cannot write ") as caught:
        prepare.prepare_dataset(settings)
    assert caught.value.cause is Cause.FILE_TOO_LARGE and "to download it again" not in str(caught.value)
    train_set, test_set = load_train_test(prepare.prepare_dataset(settings), settings)
    assert (train_set.images.numpy().reshape(15, -1) == pixels[:15]).all() and train_set.shape == (3, 32, 32)
    assert test_set.labels.tolist() == [9, 8, 7, 6, 5]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "x"), Cause.DISK_FULL),
        (UserError("x", cause=Cause.DAMAGED_DATA), Cause.DAMAGED_DATA),
        (ValueError("a damaged file"), Cause.OTHER),
        (ConnectionResetError("by a mirror"), Cause.OTHER),
    ],
)
def test_the_cause_of_an_error_leaves_the_process_that_reads(error: Exception, cause: Cause) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(UserError) as caught:
        sources.call_in_subprocess(fail)
    assert caught.value.cause is cause


def test_an_image_folder_is_decoded_once(tmp_path: Path) -> None:
    settings = Data(name="imagefolder", root=str(tmp_path), cache=str(tmp_path / "cache"), image_size=8)
    with pytest.raises(UserError, match=r"train is missing.*val/<class>"):
        prepare.prepare_dataset(settings)
    for part in ("train", "val"):
        for label, colour in enumerate(("red", "blue")):
            (tmp_path / part / colour).mkdir(parents=True)
            for number in range(3 - label):
                Image.new("RGB", (20, 12), colour).save(tmp_path / part / colour / f"{number}.png")
    first = prepare.prepare_dataset(settings)
    train_set, _ = load_train_test(first, settings)
    assert sorted(train_set.labels.tolist()) == [0, 0, 1, 1, 1] and train_set.shape == (3, 8, 8)  # blue before red
    colours = torch.tensor([[0, 0, 255], [255, 0, 0]], dtype=torch.uint8)
    assert (train_set.images == colours[train_set.labels].view(5, 3, 1, 1)).all()
    assert prepare.prepare_dataset(settings) == first
    Image.new("RGB", (20, 12), "red").save(tmp_path / "train" / "red" / "new.png")
    assert prepare.prepare_dataset(settings).path != first.path
    (tmp_path / "val" / "green").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "val" / "green" / "x.png")
    with pytest.raises(UserError, match=r"the same classes; .*: green"):
        prepare.prepare_dataset(settings)


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Two classes of one image, whose folders are links into another folder."""
    for part in ("train", "val"):
        (tmp_path / "set" / part).mkdir(parents=True)
        for colour in ("red", "blue"):
            (tmp_path / part / colour).mkdir(parents=True)
            Image.new("RGB", (9, 9), colour).save(tmp_path / part / colour / "0.png")
            (tmp_path / "set" / part / colour).symlink_to(tmp_path / part / colour)
    return tmp_path


def test_a_change_in_a_linked_folder_is_seen(linked: Path) -> None:
    settings = Data(name="imagefolder", root=str(linked / "set"), cache=str(linked / "cache"), image_size=8)
    first = prepare.prepare_dataset(settings)
    assert len(load_train_test(first, settings)[0]) == 2 and not first.notice
    Image.new("RGB", (9, 9), "red").save(linked / "train" / "red" / "1.png")
    (linked / "train" / "red" / "notes.txt").touch()
    second = prepare.prepare_dataset(settings)
    assert second.path != first.path and len(load_train_test(second, settings)[0]) == 3
    assert second.notice == "skipped (no image extension): 1 file: train/red/notes.txt"


def test_the_first_samples_of_an_image_folder_are_of_all_classes(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for label in range(5):
            (tmp_path / part / f"c{label}").mkdir(parents=True)
            for number in range(20):
                grey = 50 * label + 2 * number
                Image.new("L", (9, 9), grey).save(tmp_path / part / f"c{label}" / f"{number}.png")
    settings = Data(name="imagefolder", root=str(tmp_path), image_size=8, train_limit=50, test_limit=50)
    folders = [tmp_path / "cache", tmp_path / "another"]
    found = [prepare.prepare_dataset(dataclasses.replace(settings, cache=str(folder))) for folder in folders]
    assert found[0].sha256 == found[1].sha256, "the order is the same wherever it is prepared"
    for images in load_train_test(found[0], settings):
        counts = images.labels.bincount(minlength=5)
        assert len(images) == 50 and counts.min() >= 4, counts
        assert torch.equal(images.images[:, 0, 0, 0] // 50, images.labels), "each label goes with its image"
    whole = load_train_test(found[0], dataclasses.replace(settings, train_limit=0, test_limit=0))
    assert all(images.labels.bincount().tolist() == [20] * 5 for images in whole)
    assert not torch.equal(whole[0].labels, whole[1].labels)


def test_links_that_lead_back_and_links_to_nowhere(linked: Path) -> None:
    (linked / "train" / "red" / "again").symlink_to("..")
    for colour, other in (("red", "blue"), ("blue", "red")):
        (linked / "train" / colour / "more").symlink_to(f"../{other}")
    (linked / "val" / "blue" / "itself.txt").symlink_to("itself.txt")
    settings = Data(name="imagefolder", root=str(linked / "set"), cache=str(linked / "cache"), image_size=8)
    found = prepare.prepare_dataset(settings)
    assert found.notice == "skipped (no image extension): 1 file: val/blue/itself.txt"
    assert len(load_train_test(found, settings)[0]) == 4, "each class has its own image and, once, the other's"
    (linked / "val" / "red" / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(UserError, match=r"cannot read 1 file: val/red/gone.png \(not a regular file\);"):
        prepare.prepare_dataset(settings)


def test_what_a_killed_preparation_left_goes_with_the_next(many: Data) -> None:
    process = multiprocessing.get_context("fork").Process(target=prepare.prepare_dataset, args=(many,))
    process.start()
    cache, end = Path(many.cache), time.monotonic() + 60
    while not any(file.stat().st_size > 1e6 for file in cache.glob(".imagefolder-*/train_images.npy")):
        assert time.monotonic() < end and process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert [path.name[:13] for path in cache.iterdir() if path.name != ".lock"] == [".imagefolder-"]
    found = prepare.prepare_dataset(dataclasses.replace(many, image_size=64))
    assert sorted(path.name for path in cache.iterdir()) == [".lock", found.path.name]
    assert found.map_array("train_images").shape == (200, 3, 64, 64)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Two classes of six images; three files cannot be read, and one is none by its name."""
    for part in ("train", "val"):
        for colour in ("red", "blue"):
            (tmp_path / part / colour).mkdir(parents=True)
            for number in range(3):
                noise = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(noise).save(tmp_path / part / colour / f"{number}.{'png' if number else 'jpg'}")
    for name in ("0.jpg", "1.png"):
        whole = (tmp_path / "train" / "red" / name).read_bytes()
        (tmp_path / "train" / "red" / name).write_bytes(whole[: len(whole) // 2])
    (tmp_path / "val" / "blue" / "2.png").write_text("no image at all")
    (tmp_path / "train" / "blue" / "notes.txt").write_text("where these come from")
    return tmp_path


def test_an_image_folder_with_one_class_is_refused(damaged: Path) -> None:
    for part in ("train", "val"):
        shutil.rmtree(damaged / part / "blue")
    settings = Data(name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), image_size=8)
    with pytest.raises(UserError, match=r"train contains only one class \(red\); .*; set data.root"):
        prepare.prepare_dataset(settings)


def test_files_that_cannot_be_read_are_named_and_refused(damaged: Path) -> None:
    settings = Data(name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), image_size=8)
    with pytest.raises(UserError) as caught:
        prepare.prepare_dataset(settings)
    told = str(caught.value)
    assert "3 files: train/red/0.jpg (" in told and "train/red/1.png (" in told and "val/blue/2.png (" in told
    assert "val/blue/2.png (not an image, or truncated)" in told and "train/red/1.png (image file is truncated)" in told
    assert "data.unreadable=skip" in told and "\n" not in told
    assert not list((damaged / "cache").glob("imagefolder*"))


def test_files_that_cannot_be_read_are_skipped_if_asked_and_told_of_every_time(damaged: Path) -> None:
    settings = Data(
        name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), image_size=8, unreadable="skip"
    )
    for _ in range(2):  # when it is prepared, and when it lies there
        found = prepare.prepare_dataset(settings)
        assert "(cannot be read): 3 files: train/red/0.jpg" in found.notice
        assert "(no image extension): 1 file: train/blue/notes.txt" in found.notice
        train_set, test_set = load_train_test(found, settings)
        assert sorted(train_set.labels.tolist()) == [0, 0, 0, 1]
        assert sorted(test_set.labels.tolist()) == [0, 0, 1, 1, 1]
    noise = np.random.default_rng(2).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    kept = torch.from_numpy(noise).permute(2, 0, 1).double().mean()
    (red,) = train_set.images[train_set.labels == 1]
    assert abs(red.double().mean() - kept) < 5, "the label goes with its own image"
    with pytest.raises(UserError, match="3 files"):
        prepare.prepare_dataset(dataclasses.replace(settings, unreadable="refuse"))


def test_many_files_left_out_are_listed_beside_the_arrays_whatever_their_names(damaged: Path) -> None:
    settings = Data(name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), image_size=8)
    odd = os.fsdecode(b"train/blue/\xff.png")  # no UTF-8
    (damaged / odd).write_text("no image")
    with pytest.raises(UserError, match=r"4 files: train/blue/\\udcff.png \(") as caught:
        prepare.prepare_dataset(settings)
    str(caught.value).encode()  # else it could not be printed
    settings = dataclasses.replace(settings, unreadable="skip")
    notice = prepare.prepare_dataset(settings).notice
    notice.encode()
    assert "full list" not in notice, "4 are named"
    for number in range(3):
        (damaged / "val" / "red" / f"more{number}.png").write_text("no image")
    found = prepare.prepare_dataset(settings)
    assert "(cannot be read): 7 files: train/blue/\\udcff.png" in found.notice and " and 2 more" in found.notice
    listed = found.path / "left_out.txt"
    assert found.notice.endswith(f"full list: {listed}") and prepare.prepare_dataset(settings) == found
    lines = listed.read_bytes().splitlines()
    names = [line.partition(b" (")[0].partition(b": ")[0] for line in lines]
    more = [f"val/red/more{number}.png".encode() for number in range(3)]
    unreadable = [b"train/blue/\xff.png", b"train/red/0.jpg", b"train/red/1.png", b"val/blue/2.png", *more]
    assert names == [*unreadable, b"train/blue/notes.txt"]
    assert lines[-1] == b"train/blue/notes.txt: no image extension"


def test_a_class_without_a_readable_image_is_refused(damaged: Path) -> None:
    (damaged / "train" / "red" / "2.png").write_text("gone")
    settings = Data(name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), unreadable="skip")
    with pytest.raises(UserError, match=r"no image in .*train/red can be read: 3 files"):
        prepare.prepare_dataset(settings)


def test_the_progress_of_a_preparation_is_shown(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    settings = Data(
        name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), image_size=8, unreadable="skip"
    )
    prepare.prepare_dataset(settings, log=Log(progress="lines"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["preparation", "0/0"]
    assert re.fullmatch(r"preparation 2/\d+  \d+/s  \d+ s left", lines[2])
    done, total = lines[-1].split()[1].split("/")
    assert done == total
    prepare.prepare_dataset(settings, log=Log(progress="lines"))
    assert not capsys.readouterr().out, "it is prepared once"
