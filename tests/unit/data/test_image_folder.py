"""Preparing image folders: changes, links, unreadable files, progress, and killed preparations."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common.data.prepare import prepare_dataset
from common.runs import progress
from common.system.errors import UserError
from configs.shared import Data, Log
from tests.harness.commands.processes import wait_until
from tests.harness.environment.prepared_images import load_train_test


def make_settings(root: Path, **settings: Any) -> Data:
    return Data(name="imagefolder", root=str(root), cache=str(root / "cache"), image_size=8, **settings)


def write_image(file: Path, color: str | int) -> None:
    """Write an image of one color (RGB) or of one gray level."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB" if isinstance(color, str) else "L", (20, 12), color).save(file)


@pytest.fixture
def red_and_blue(tmp_path: Path) -> Path:
    """Write two classes: three red images and two blue ones in each part."""
    for part in ("train", "val"):
        for color, count in (("red", 3), ("blue", 2)):
            for number in range(count):
                write_image(tmp_path / part / color / f"{number}.png", color)
    return tmp_path


def test_an_image_folder_is_decoded_once_unless_it_changes(red_and_blue: Path) -> None:
    settings = make_settings(red_and_blue)
    prepared = prepare_dataset(settings)
    train_set, _ = load_train_test(prepared, settings)
    assert train_set.shape == (3, 8, 8)
    assert sorted(train_set.labels.tolist()) == [0, 0, 1, 1, 1]  # blue comes before red
    colors = torch.tensor([[0, 0, 255], [255, 0, 0]], dtype=torch.uint8)
    assert (train_set.images == colors[train_set.labels].view(5, 3, 1, 1)).all()

    assert prepare_dataset(settings) == prepared
    write_image(red_and_blue / "train" / "red" / "new.png", "red")
    assert prepare_dataset(settings).path != prepared.path


def test_a_folder_without_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train is missing.*val/<class>"):
        prepare_dataset(make_settings(tmp_path))


def test_parts_with_different_classes_are_refused(red_and_blue: Path) -> None:
    write_image(red_and_blue / "val" / "green" / "x.png", "green")
    with pytest.raises(UserError, match=r"the same classes; .*: green"):
        prepare_dataset(make_settings(red_and_blue))


def test_an_image_folder_with_one_class_is_refused(red_and_blue: Path) -> None:
    for part in ("train", "val"):
        shutil.rmtree(red_and_blue / part / "blue")
    with pytest.raises(UserError, match=r"train contains only one class \(red\); .*; set data.root"):
        prepare_dataset(make_settings(red_and_blue))


@pytest.fixture
def five_grays(tmp_path: Path) -> Path:
    """Write five classes of 20 images, whose gray level divided by 50 is the label."""
    for part in ("train", "val"):
        for label in range(5):
            for number in range(20):
                write_image(tmp_path / part / f"c{label}" / f"{number}.png", 50 * label + 2 * number)
    return tmp_path


def test_the_first_samples_contain_all_classes(five_grays: Path) -> None:
    settings = make_settings(five_grays, train_limit=50, test_limit=50)
    prepared = prepare_dataset(settings)
    for images in load_train_test(prepared, settings):
        counts = images.labels.bincount(minlength=5)
        assert len(images) == 50
        assert counts.min() >= 4, counts
        assert torch.equal(images.images[:, 0, 0, 0] // 50, images.labels), "labels and images do not match"

    train_set, test_set = load_train_test(prepared, dataclasses.replace(settings, train_limit=0, test_limit=0))
    assert train_set.labels.bincount().tolist() == [20] * 5
    assert test_set.labels.bincount().tolist() == [20] * 5
    assert not torch.equal(train_set.labels, test_set.labels)


def test_the_order_of_samples_does_not_depend_on_the_cache(five_grays: Path) -> None:
    settings = make_settings(five_grays)
    other_settings = dataclasses.replace(settings, cache=str(five_grays / "other"))
    assert prepare_dataset(settings).sha256 == prepare_dataset(other_settings).sha256


def test_images_with_more_than_8_bits_are_refused(red_and_blue: Path) -> None:
    """The conversion to 8 bits would clip the values."""
    pixels = np.full((12, 20), 40_000, np.uint16)
    Image.fromarray(pixels).save(red_and_blue / "train" / "red" / "deep.png")
    with pytest.raises(UserError, match=r"train/red/deep.png .*more than 8 bits; convert the image"):
        prepare_dataset(make_settings(red_and_blue))


def test_an_image_outside_the_folders_of_the_classes_is_skipped(red_and_blue: Path) -> None:
    write_image(red_and_blue / "train" / "stray.png", "red")
    prepared = prepare_dataset(make_settings(red_and_blue))
    assert prepared.notice == "skipped (not in the folder of a class): 1 file: train/stray.png"


# ---- links


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Write two classes of one image; their folders in `set` are links to folders outside."""
    for part in ("train", "val"):
        (tmp_path / "set" / part).mkdir(parents=True)
        for color in ("red", "blue"):
            write_image(tmp_path / part / color / "0.png", color)
            (tmp_path / "set" / part / color).symlink_to(tmp_path / part / color)
    return tmp_path


def test_a_change_in_a_linked_folder_is_detected(linked: Path) -> None:
    settings = make_settings(linked / "set")
    old = prepare_dataset(settings)
    old_train_set, _ = load_train_test(old, settings)
    assert len(old_train_set) == 2
    assert not old.notice

    write_image(linked / "train" / "red" / "1.png", "red")
    (linked / "train" / "red" / "notes.txt").touch()
    new = prepare_dataset(settings)
    new_train_set, _ = load_train_test(new, settings)
    assert new.path != old.path
    assert len(new_train_set) == 3
    assert new.notice == "skipped (no image extension): 1 file: train/red/notes.txt"


def test_cyclic_links_are_followed_once_and_broken_links_are_refused(linked: Path) -> None:
    (linked / "train" / "red" / "parent").symlink_to("..")
    (linked / "train" / "red" / "more").symlink_to("../blue")
    (linked / "train" / "blue" / "more").symlink_to("../red")
    (linked / "val" / "blue" / "itself.txt").symlink_to("itself.txt")
    settings = make_settings(linked / "set")
    prepared = prepare_dataset(settings)
    assert prepared.notice == "skipped (no image extension): 1 file: val/blue/itself.txt"
    train_set, _ = load_train_test(prepared, settings)
    assert len(train_set) == 4, "each class has its image and, once, the image of the other class"

    (linked / "val" / "red" / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(UserError, match=r"cannot read 1 file: val/red/gone.png \(not a regular file\);"):
        prepare_dataset(settings)


def test_the_next_preparation_deletes_the_files_of_a_killed_one(many: Data) -> None:
    cache = Path(many.cache)
    process = multiprocessing.get_context("fork").Process(target=prepare_dataset, args=(many,))

    def has_written_images() -> bool:
        assert process.is_alive()
        return any(file.stat().st_size > 1e6 for file in cache.glob(".imagefolder-*/train_images.npy"))

    process.start()
    wait_until(has_written_images, "images are written", seconds=60, pause=0.01)
    process.kill()
    process.join()
    (temporary_folder,) = cache.glob(".imagefolder-*")
    assert sorted(cache.iterdir()) == [temporary_folder, cache / ".lock"]

    prepared = prepare_dataset(dataclasses.replace(many, image_size=64))
    assert sorted(cache.iterdir()) == [cache / ".lock", prepared.path]
    assert prepared.map_array("train_images").shape == (200, 3, 64, 64)


# ---- unreadable files


def draw_noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (20, 20, 3), dtype=np.uint8)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Write two classes of six images. Three files are unreadable, and one more has no image extension."""
    for part in ("train", "val"):
        for color in ("red", "blue"):
            folder = tmp_path / part / color
            folder.mkdir(parents=True)
            Image.fromarray(draw_noise(0)).save(folder / "0.jpg")
            Image.fromarray(draw_noise(1)).save(folder / "1.png")
            Image.fromarray(draw_noise(2)).save(folder / "2.png")
    for name in ("0.jpg", "1.png"):
        file = tmp_path / "train" / "red" / name
        os.truncate(file, file.stat().st_size // 2)
    (tmp_path / "val" / "blue" / "2.png").write_text("not an image")
    (tmp_path / "train" / "blue" / "notes.txt").write_text("source of the images")
    return tmp_path


def test_unreadable_files_are_refused_and_named(damaged: Path) -> None:
    with pytest.raises(UserError) as caught:
        prepare_dataset(make_settings(damaged))
    message = str(caught.value)
    assert "3 files: train/red/0.jpg (" in message
    assert "train/red/1.png (image file is truncated)" in message
    assert "val/blue/2.png (not an image, or truncated)" in message
    assert "data.unreadable=skip" in message
    assert "\n" not in message
    assert not list((damaged / "cache").glob("imagefolder*"))


def test_unreadable_files_are_skipped_on_request_and_always_reported(damaged: Path) -> None:
    settings = make_settings(damaged, unreadable="skip")
    for _ in range(2):  # the second time, the prepared set is found
        prepared = prepare_dataset(settings)
        assert "(cannot be read): 3 files: train/red/0.jpg" in prepared.notice
        assert "(no image extension): 1 file: train/blue/notes.txt" in prepared.notice
        train_set, test_set = load_train_test(prepared, settings)
        assert sorted(train_set.labels.tolist()) == [0, 0, 0, 1]
        assert sorted(test_set.labels.tolist()) == [0, 0, 1, 1, 1]
    (red_image,) = train_set.images[train_set.labels == 1]
    assert abs(red_image.double().mean() - draw_noise(2).mean()) < 5, "labels and images do not match"
    with pytest.raises(UserError, match="3 files"):
        prepare_dataset(dataclasses.replace(settings, unreadable="refuse"))


def test_file_names_that_are_not_utf8_can_be_printed(damaged: Path) -> None:
    (damaged / os.fsdecode(b"train/blue/\xff.png")).write_text("not an image")
    with pytest.raises(UserError, match=r"4 files: train/blue/\\udcff.png \(") as caught:
        prepare_dataset(make_settings(damaged))
    str(caught.value).encode()
    notice = prepare_dataset(make_settings(damaged, unreadable="skip")).notice
    notice.encode()
    assert "full list" not in notice, "the notice names up to five files"


def test_many_skipped_files_are_listed_in_a_file(damaged: Path) -> None:
    (damaged / os.fsdecode(b"train/blue/\xff.png")).write_text("not an image")
    for number in range(3):
        (damaged / "val" / "red" / f"more{number}.png").write_text("not an image")
    settings = make_settings(damaged, unreadable="skip")
    prepared = prepare_dataset(settings)
    list_file = prepared.path / "left_out.txt"
    assert "(cannot be read): 7 files: train/blue/\\udcff.png" in prepared.notice
    assert " and 2 more" in prepared.notice
    assert prepared.notice.endswith(f"full list: {list_file}")
    assert prepare_dataset(settings) == prepared

    lines = list_file.read_bytes().splitlines()
    assert lines.pop() == b"train/blue/notes.txt: no image extension"
    names = [b"train/blue/\xff.png", b"train/red/0.jpg", b"train/red/1.png", b"val/blue/2.png"]
    names += [b"val/red/more0.png", b"val/red/more1.png", b"val/red/more2.png"]
    assert [line.partition(b" (")[0] for line in lines] == names


def test_a_class_without_a_readable_image_is_refused(damaged: Path) -> None:
    (damaged / "train" / "red" / "2.png").write_text("not an image")
    with pytest.raises(UserError, match=r"no image in .*train/red can be read: 3 files"):
        prepare_dataset(make_settings(damaged, unreadable="skip"))


def test_the_progress_of_a_preparation_is_shown(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    settings = make_settings(damaged, unreadable="skip")
    prepare_dataset(settings, log=Log(progress="lines"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["preparation", "0/0"]
    assert re.fullmatch(r"preparation 2/\d+  \d+/s  \d+ s left", lines[2])
    count, total = lines[-1].split()[1].split("/")
    assert count == total
    prepare_dataset(settings, log=Log(progress="lines"))
    assert not capsys.readouterr().out, "the set is prepared once"
