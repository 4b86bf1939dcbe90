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


def read_folder(root: Path, side: int) -> Arrays:
    """root/train/<class>/* and root/val/<class>/*: the shorter edge resized to `side`, the middle cut out."""
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    decode = v2.Compose([v2.PILToTensor(), v2.Resize(side, antialias=True), v2.CenterCrop(side)])
    parts = [ImageFolder(str(root / name), decode) for name in ("train", "val")]
    if parts[0].classes != parts[1].classes:
        differing = sorted(set(parts[0].classes) ^ set(parts[1].classes))
        raise ValueError(f"train and val have different classes: {', '.join(differing[:5])}")
    arrays: list[np.ndarray] = []
    for part in parts:
        images = torch.empty(len(part), 3, side, side, dtype=torch.uint8)
        for number, (image, _) in enumerate(part):
            images[number] = image
        arrays += [images.numpy(), np.asarray(part.targets, np.int32)]
    return arrays[0], arrays[1], arrays[2], arrays[3]
