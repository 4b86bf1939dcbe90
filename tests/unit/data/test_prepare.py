"""Preparing data sets: once for all processes, with checksums; generated images and CIFAR-10."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.data import prepare
from common.data.sources import Arrays
from common.data.synthetic_digits import generate_digits
from common.system.causes import Cause
from common.system.errors import UserError
from configs.shared import Data
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.environment.prepared_images import load_train_test
from tests.harness.environment.size_limit import limit_file_size


def test_processes_that_start_together_prepare_a_data_set_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def make_arrays() -> Arrays:
        with open(calls, "a") as file:
            file.write("x")
        time.sleep(0.3)  # long enough for all processes to find no prepared set
        return (*generate_digits(50, 0, "train"), *generate_digits(20, 0, "test"))

    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)

    def prepare_small_dataset() -> None:
        barrier.wait(WAIT_TIMEOUT)
        prepare.find_or_store_arrays(tmp_path / "cache", "digits", "small", make_arrays).verify_checksums()

    processes = [context.Process(target=prepare_small_dataset, daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_TIMEOUT)
    assert [process.exitcode for process in processes] == [0] * 4
    assert calls.read_text() == "x"


def test_checksums_are_those_of_the_files(cache: Path) -> None:
    prepared = prepare.prepare_digits(cache)
    content = (prepared.path / "test_labels.npy").read_bytes()
    assert prepared.sha256["test_labels"] == hashlib.sha256(content).hexdigest()
    assert os.access(prepared.path, os.R_OK)


def test_generated_images_are_labelled_as_such(tmp_path: Path) -> None:
    settings = Data(name="generated", cache=str(tmp_path), samples=50, image_size=16, classes=7)
    prepared = prepare.prepare_dataset(settings)
    assert prepared.name == "generated"
    assert "only to measure throughput" in prepared.notice
    train_set, test_set = load_train_test(prepared, settings)
    assert train_set.shape == (3, 16, 16)
    assert train_set.outputs == 7
    assert len(test_set) == 10
    inputs = train_set.load_inputs(slice(0, 50), torch.device("cpu"), torch.float64)
    assert abs(inputs.mean().item()) < 0.05
    assert abs(inputs.std().item() - 1) < 0.05


def test_missing_cifar10_is_refused_with_an_alternative(tmp_path: Path) -> None:
    settings = Data(name="cifar10", root=str(tmp_path), cache=str(tmp_path / "cache"), download_timeout=0)
    with pytest.raises(UserError, match=r"CIFAR-10 is not in the folder .*data\.name=generated"):
        prepare.prepare_dataset(settings)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"truncated")
    with pytest.raises(UserError, match=r"corrupted.*delete .*data\.name=generated"):
        prepare.prepare_dataset(settings)


@pytest.fixture
def cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """Write a CIFAR-10 set of 15 training and 5 test images, and make torchvision accept it."""
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = draw_cifar10_pixels()

    def write_batch(name: str, content: dict[str, Any]) -> list[str]:
        payload = pickle.dumps(content)
        (folder / name).write_bytes(payload)
        return [name, hashlib.md5(payload).hexdigest()]

    train_entry = write_batch("data_batch_1", {"data": pixels[:15], "labels": list(range(10)) + [0] * 5})
    test_entry = write_batch("test_batch", {"data": pixels[15:], "labels": [9, 8, 7, 6, 5]})
    name, md5 = write_batch("batches.meta", {"label_names": [str(label) for label in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", [train_entry])
    monkeypatch.setattr(CIFAR10, "test_list", [test_entry])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return Data(name="cifar10", root=str(tmp_path), cache=str(tmp_path / "cache"))


def draw_cifar10_pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)


def test_cifar10_is_read_with_torchvision(cifar10: Data) -> None:
    train_set, test_set = load_train_test(prepare.prepare_dataset(cifar10), cifar10)
    assert train_set.shape == (3, 32, 32)
    assert np.array_equal(train_set.images.numpy().reshape(15, -1), draw_cifar10_pixels()[:15])
    assert test_set.labels.tolist() == [9, 8, 7, 6, 5]


def test_a_data_set_that_cannot_be_written_has_a_cause(cifar10: Data) -> None:
    with limit_file_size(9), pytest.raises(UserError, match="cannot write ") as caught:
        prepare.prepare_dataset(cifar10)
    assert caught.value.cause is Cause.FILE_TOO_LARGE
    assert "to download it again" not in str(caught.value)


def test_a_prepared_data_set_with_a_missing_part_is_not_used(cache: Path, tmp_path: Path) -> None:
    (prepared,) = cache.glob("digits-*")
    folder = shutil.copytree(prepared, tmp_path / "digits")
    assert prepare.read_prepared_dataset("digits", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for key in ("bytes", "sha256"):
        del manifest[key]["test_labels"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert prepare.read_prepared_dataset("digits", folder) is None
