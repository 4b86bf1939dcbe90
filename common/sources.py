"""Image sets as uint8 arrays, out of the files that torchvision reads or out of a random stream.

Each function gives train images, train labels, test images, test labels; colour images are [N, 3, H, W].
Whoever calls them keeps the result (common/prepare.py): nothing is decoded twice.
"""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np

from common import seeds

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def generated(count: int, side: int, classes: int, seed: int) -> Arrays:
    """Random pixels with random labels: nothing can be learnt from them, but a step takes as long as with real ones."""

    def part(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        rng = seeds.generator(seed, "generated", name)
        labels = np.arange(size, dtype=np.int32) % classes  # every class is there
        return rng.integers(0, 256, (size, 3, side, side), dtype=np.uint8), rng.permutation(labels)

    return (*part("train", count), *part("test", max(1, count // 5)))


def vectors(count: int, seed: int) -> Arrays:
    """Vectors of 10 random numbers; the class is which of 5 fixed directions one points along most."""
    directions = seeds.generator(seed, "vectors", "directions").standard_normal((10, 5))

    def part(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = seeds.generator(seed, "vectors", name).integers(0, 256, (size, 10), dtype=np.uint8)
        return numbers, ((numbers - 127.5) @ directions).argmax(1).astype(np.int32)

    return (*part("train", count), *part("test", max(1, count // 5)))


def download_mnist(root: Path, timeout: float) -> None:
    from torchvision.datasets import MNIST

    socket.setdefaulttimeout(timeout)
    MNIST(str(root), download=True)


def read_mnist(root: Path) -> Arrays:
    from torchvision.datasets import MNIST

    train, test = MNIST(str(root), train=True), MNIST(str(root), train=False)
    labels = [part.targets.numpy().astype(np.uint8) for part in (train, test)]
    return train.data.numpy(), labels[0], test.data.numpy(), labels[1]


def download_cifar10(root: Path, timeout: float) -> None:
    from torchvision.datasets import CIFAR10

    socket.setdefaulttimeout(timeout)
    CIFAR10(str(root), download=True)


def read_cifar10(root: Path) -> Arrays:
    """torchvision compares the files with their known checksums."""
    from torchvision.datasets import CIFAR10

    train, test = CIFAR10(str(root), train=True), CIFAR10(str(root), train=False)
    images = [np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)) for part in (train, test)]
    labels = [np.asarray(part.targets, np.uint8) for part in (train, test)]
    return images[0], labels[0], images[1], labels[1]


def read_folder(root: Path, side: int, unreadable: str) -> tuple[Arrays, str]:
    """root/train/<class>/* and root/val/<class>/*: the shorter edge resized to `side`, the middle cut out.

    Also says what was left out: files that are no images by their name and, with `unreadable` = skip, those that
    cannot be read. Else these are refused with a ValueError that names them.
    """
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import default_loader
    from torchvision.transforms import v2

    decode = v2.Compose([v2.PILToTensor(), v2.Resize(side, antialias=True), v2.CenterCrop(side)])
    parts = [ImageFolder(str(root / name)) for name in ("train", "val")]
    if parts[0].classes != parts[1].classes:
        differing = sorted(set(parts[0].classes) ^ set(parts[1].classes))
        raise ValueError(f"train and val have different classes: {', '.join(differing[:5])}")
    arrays: list[np.ndarray] = []
    broken: list[str] = []
    for part in parts:
        images = torch.empty(len(part), 3, side, side, dtype=torch.uint8)
        labels: list[int] = []
        for path, label in part.samples:
            try:
                images[len(labels)] = decode(default_loader(path))
            except Exception as error:  # noqa: BLE001 (Pillow raises many kinds for what it cannot read)
                broken.append(f"{Path(path).relative_to(root)} ({first_line(error, path)})")
            else:
                labels.append(label)
        left = sorted(set(part.class_to_idx.values()) - set(labels))
        if left and unreadable == "skip":
            raise ValueError(f"no image of {part.root}/{part.classes[left[0]]} can be read: {named(broken)}")
        arrays += [images[: len(labels)].numpy(), np.asarray(labels, np.int32)]
    if broken and unreadable == "refuse":
        raise ValueError(f"{named(broken)} cannot be read; mend or remove them, or set data.unreadable=skip")
    known = {path for part in parts for path, _ in part.samples}
    listed = sorted(path for part in parts for path in Path(part.root).rglob("*") if path.is_file())
    others = [str(path.relative_to(root)) for path in listed if str(path) not in known]
    told = [(broken, "cannot be read"), (others, "no images by their names")]
    return (arrays[0], arrays[1], arrays[2], arrays[3]), "; ".join(
        f"left out, {why}: {named(files)}" for files, why in told if files
    )


def named(files: list[str], most: int = 5) -> str:
    """How many, and the first of them by name."""
    more = f" and {len(files) - most} more" if len(files) > most else ""
    return f"{len(files)} file{'s' * (len(files) > 1)}: {', '.join(files[:most])}{more}"


def first_line(error: Exception, path: str) -> str:
    """An error in few words, without the path that is told anyway."""
    return (str(error).replace(repr(path), "it").strip().splitlines() or [type(error).__name__])[0]
