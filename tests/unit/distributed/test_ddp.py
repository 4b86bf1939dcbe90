"""Data parallelism around the method: shares, settings, reports, and the sets that only it reads."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from common.core import config
from common.core.errors import UserError
from common.data import loader as data
from common.data import prepare
from common.distributed import sync_batchnorm
from common.measure import step_timing
from common.measure.step_timing import RankTimes, ScalingReport
from common.models import networks
from common.training.evaluate import slice_shard
from configs.ddp_multinode import Config
from configs.mnist_pipeline import Config as Pipelined
from configs.shared import Data
from tests.harness.ddp_pitfalls import made
from tests.harness.images import load_train_test
from tests.harness.processes import run


@pytest.mark.parametrize(("count", "size", "ranks"), [(101, 16, 2), (101, 16, 4), (9, 4, 2), (1, 10, 3), (64, 64, 1)])
def test_shares_cover_every_sample_once_in_equally_many_slices(count: int, size: int, ranks: int) -> None:
    slices = [list(slice_shard(count, size, rank, ranks)) for rank in range(ranks)]
    assert len({len(mine) for mine in slices}) == 1
    assert sorted(i for mine in slices for s in mine for i in range(s.start, s.stop)) == list(range(count))
    lengths = [s.stop - s.start for mine in slices for s in mine]
    assert max(lengths) <= size and max(lengths) - min(lengths) <= 1


def test_shares_of_a_batch_are_the_batch(cache: Path) -> None:
    images = data.Images(prepare.prepare_digits(cache), "train", limit=200)

    def loader(share: tuple[int, int]) -> data.Loader:
        return data.Loader(images, 24, 3, torch.device("cpu"), torch.float32, block=3, shard=share)

    whole = [(x, y) for x, y in loader((0, 1))]
    parts = [[(x, y) for x, y in loader((rank, 4))] for rank in range(4)]
    assert len(whole) == 8
    for step, (x, y) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), x)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), y)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["batch=63"], ["batch=63", "2 ranks", "batch=62 or 64", "processes_per_node=1"]),
        (["batch=64", "processes_per_node=5"], ["batch=60 or 65", "processes_per_node=4"]),
        (["sync_batchnorm=true"], ["model=convnet has no BatchNorm", "model=resnet18"]),
        (["strategy=fsdp", "communication=fp16"], ["communication is a setting of ddp", "strategy=ddp"]),
        (["strategy=fsdp", "static_graph=true"], ["static_graph is a setting of ddp"]),
        (["data.name=generated", "data.samples=50"], ["batch=64 exceeds the 50 training samples"]),
        (["data.name=cifar10", "batch=50002"], ["exceeds the 50000 training samples"]),
    ],
)
def test_settings_of_data_parallelism_that_do_not_fit_are_refused(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load_config(Config, words, {})
    assert all(part in str(caught.value) for part in parts), caught.value


def test_data_parallel_processes_follow_from_the_nodes() -> None:
    assert config.load_config(Config, [], {}).processes == 2
    assert config.load_config(Config, ["launch.nodes=4"], {}).processes == 4
    assert config.load_config(Config, ["launch.nodes=2", "processes_per_node=8"], {}).processes == 16


def test_the_pipeline_takes_only_its_own_images() -> None:
    with pytest.raises(UserError, match="28x28"):
        config.load_config(Pipelined, ["data.name=cifar10"], {})


def test_resnet_is_torchvisions_with_another_stem() -> None:
    torchvision = pytest.importorskip("torchvision")
    theirs = torchvision.models.resnet18(num_classes=10)
    theirs.conv1, theirs.maxpool = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.Identity()
    ours = networks.build_network("resnet18", (3, 32, 32), 10)
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert mine.shape == other.shape
        mine.copy_(other)
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)
    assert networks.ConvNet((28, 28), 10).state_dict()["fc1.weight"].shape == (100, 64 * 12 * 12)


def test_each_process_keeps_its_own_statistics() -> None:
    assert made("own_statistics")["own_statistics"] == [True, True]


def test_torchs_own_synchronised_norm_refuses_the_cpu() -> None:
    assert all("GPU" in answer["error"] for answer in made("torchs_norm")["torchs_norm"])
    plain, other = (networks.ResNet("resnet18", (3, 32, 32), 10, width=8) for _ in range(2))
    ours = sync_batchnorm.convert_sync_batchnorm(other, torch.device("cpu"))
    assert ours.state_dict().keys() == plain.state_dict().keys()
    assert sum(isinstance(module, sync_batchnorm.SyncBatchNorm2d) for module in ours.modules()) == 20


def rank(before: float, exposed: tuple[float, ...] = ()) -> RankTimes:
    return RankTimes(data=0.001, before_backward=before, step=0.1, steps=50, exposed=exposed)


def test_the_report_names_the_straggler_and_what_is_not_hidden() -> None:
    ranks = [rank(0.010, (0.5, 0.2, 0.9)), rank(0.020, (0.1, 0.3, 0.2)), rank(0.011, (0.6, 0.2, 0.4))]
    found = ScalingReport(ranks, ("a", "b", "c"), communication=0.4, alone=0.15, step=0.1)
    assert found.straggler == 1 and "rank 1 on b: 20.00 ms" in found.rows()["straggler"]
    assert found.exposed == pytest.approx(0.2 / 0.4)  # the median of 0.1, 0.2, 0.2
    assert found.efficiency == pytest.approx(0.15 / 0.1 / 3) and "50%" in found.rows()["efficiency"]
    assert ScalingReport([rank(0.010), rank(0.011)], ("a", "b"), 0.1).straggler is None
    assert ScalingReport(ranks[:1], "a", 0.1).rows().keys() == {"ms per step"}


def test_how_a_process_does_is_told_from_enough_steps_on() -> None:
    times = step_timing.StepTimes(nn.Linear(1, 1), torch.device("cpu"))
    for _ in times.iterate(range(step_timing.WARM_UP + step_timing.ENOUGH)):
        times.mark("backward")
        assert times.estimate_recent() is None
    assert times.estimate_recent() is not None


def test_ddp_multinode_reports_its_efficiency_if_asked(tmp_path: Path, digits: tuple[str, ...]) -> None:
    done = run("ddp_multinode", *digits, "batch=16", "compare=true", runs=tmp_path)
    assert done.status == 0, done.err
    result = done.result
    assert 0 < result["efficiency"] < 4 and 0 < result["communication_exposed"] <= 1
    assert "efficiency" in done.out and len(result["ranks"]) == 2


# ---- data


def test_generated_images_are_labelled_as_such(tmp_path: Path) -> None:
    settings = Data(name="generated", cache=str(tmp_path), samples=50, image_size=16, classes=7)
    found = prepare.prepare_dataset(settings)
    assert found.name == "generated" and "throughput only" in found.notice
    train_set, test_set = load_train_test(found, settings)
    assert train_set.shape == (3, 16, 16) and train_set.classes == 7 and len(test_set) == 10
    x = train_set.load_inputs(slice(0, 50), torch.device("cpu"), torch.float64)
    assert abs(x.mean().item()) < 0.05 and abs(x.std().item() - 1) < 0.05


def test_missing_cifar10_is_refused_naming_what_would_do(tmp_path: Path) -> None:
    settings = Data(name="cifar10", root=str(tmp_path), cache=str(tmp_path / "cache"), download_timeout=0)
    with pytest.raises(UserError, match=r"CIFAR-10 is not under .*data\.name=generated"):
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
    train_set, test_set = load_train_test(prepare.prepare_dataset(settings), settings)
    assert (train_set.images.numpy().reshape(15, -1) == pixels[:15]).all() and train_set.shape == (3, 32, 32)
    assert test_set.labels.tolist() == [9, 8, 7, 6, 5]


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
    with pytest.raises(UserError, match="different classes: green"):
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
    assert second.notice == "left out, no images by their names: 1 file: train/red/notes.txt"


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
    assert found.notice == "left out, no images by their names: 1 file: val/blue/itself.txt"
    assert len(load_train_test(found, settings)[0]) == 4, "each class has its own image and, once, the other's"
    (linked / "val" / "red" / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(UserError, match=r"1 file: val/red/gone.png \(no file\) cannot be read"):
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
    many.image_size = 64
    found = prepare.prepare_dataset(many)
    assert sorted(path.name for path in cache.iterdir()) == [".lock", found.path.name]
    assert found.array("train_images").shape == (200, 3, 64, 64)


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


def test_files_that_cannot_be_read_are_named_and_refused(damaged: Path) -> None:
    settings = Data(name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), image_size=8)
    with pytest.raises(UserError) as caught:
        prepare.prepare_dataset(settings)
    told = str(caught.value)
    assert "3 files: train/red/0.jpg (" in told and "train/red/1.png (" in told and "val/blue/2.png (" in told
    assert "data.unreadable=skip" in told and "\n" not in told
    assert not list((damaged / "cache").glob("imagefolder*"))


def test_files_that_cannot_be_read_are_skipped_if_asked_and_told_of_every_time(damaged: Path) -> None:
    settings = Data(name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), image_size=8)
    settings.unreadable = "skip"
    for _ in range(2):  # when it is prepared, and when it lies there
        found = prepare.prepare_dataset(settings)
        assert "cannot be read: 3 files: train/red/0.jpg" in found.notice
        assert "no images by their names: 1 file: train/blue/notes.txt" in found.notice
        train_set, test_set = load_train_test(found, settings)
        assert sorted(train_set.labels.tolist()) == [0, 0, 0, 1]
        assert sorted(test_set.labels.tolist()) == [0, 0, 1, 1, 1]
    noise = np.random.default_rng(2).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    kept = torch.from_numpy(noise).permute(2, 0, 1).double().mean()
    (red,) = train_set.images[train_set.labels == 1]
    assert abs(red.double().mean() - kept) < 5, "the label goes with its own image"
    settings.unreadable = "refuse"
    with pytest.raises(UserError, match="3 files"):
        prepare.prepare_dataset(settings)


def test_many_files_left_out_are_listed_beside_the_arrays_whatever_their_names(damaged: Path) -> None:
    settings = Data(name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), image_size=8)
    odd = os.fsdecode(b"train/blue/\xff.png")  # no UTF-8
    (damaged / odd).write_text("no image")
    with pytest.raises(UserError, match=r"4 files: train/blue/\\udcff.png \(") as caught:
        prepare.prepare_dataset(settings)
    str(caught.value).encode()  # else it could not be printed
    settings.unreadable = "skip"
    notice = prepare.prepare_dataset(settings).notice
    notice.encode()
    assert "all of them" not in notice, "4 are named"
    for number in range(3):
        (damaged / "val" / "red" / f"more{number}.png").write_text("no image")
    found = prepare.prepare_dataset(settings)
    assert "cannot be read: 7 files: train/blue/\\udcff.png" in found.notice and " and 2 more" in found.notice
    listed = found.path / "left_out.txt"
    assert found.notice.endswith(f"all of them: {listed}") and prepare.prepare_dataset(settings) == found
    lines = listed.read_bytes().splitlines()
    names = [line.partition(b" (")[0].partition(b": ")[0] for line in lines]
    more = [f"val/red/more{number}.png".encode() for number in range(3)]
    unreadable = [b"train/blue/\xff.png", b"train/red/0.jpg", b"train/red/1.png", b"val/blue/2.png", *more]
    assert names == [*unreadable, b"train/blue/notes.txt"]
    assert lines[-1] == b"train/blue/notes.txt: no images by their names"


def test_a_class_without_a_readable_image_is_refused(damaged: Path) -> None:
    (damaged / "train" / "red" / "2.png").write_text("gone")
    settings = Data(name="imagefolder", root=str(damaged), cache=str(damaged / "cache"), unreadable="skip")
    with pytest.raises(UserError, match=r"no image of .*train/red can be read: 3 files"):
        prepare.prepare_dataset(settings)
