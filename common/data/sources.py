"""Image sets as uint8 arrays, out of the files that torchvision reads or out of a random stream.

Each function gives train images, train labels, test images, test labels; colour images are [N, 3, H, W].
Whoever calls them keeps the result (common/data/prepare.py): nothing is decoded twice.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.core import seeds
from common.core.errors import UserError
from common.core.signals import die_with_parent

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
LINGER = 5.0  # seconds for a process that has answered to leave by itself


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


def files_below(folder: Path) -> list[str]:
    """All files below a folder by their paths in it, sorted. Links are followed, except back to a folder they lie in.

    What is no folder counts as a file, a link to nowhere too. Raises UserError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{shown(str(error.filename))} cannot be listed ({error.strerror}); mend or remove it")

    found: list[str] = []
    # of each folder still to come: what it and the folders above it really are
    within: dict[str, list[str]] = {str(folder): [os.path.realpath(folder)]}
    for place, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        above = within.pop(place)
        real = {name: os.path.realpath(f"{place}/{name}") for name in folders}
        folders[:] = [name for name in folders if not any(lies_in(outer, real[name]) for outer in above)]
        within |= {f"{place}/{name}": [*above, real[name]] for name in folders}
        found += [f"{place}/{name}"[len(f"{folder}/") :] for name in files]
    return sorted(found)


def lies_in(path: str, folder: str) -> bool:
    """Whether one real path is the other or below it."""
    return os.path.commonpath([path, folder]) == folder


def tree_state(folder: Path) -> str:
    """Changes whenever a file in the folder is added, removed or replaced."""
    lines = []
    for name in files_below(folder):
        try:
            found = (folder / name).stat()
        except OSError as error:
            lines.append(f"{name} cannot be read: {error.errno}\n")
        else:
            lines.append(f"{name} {found.st_size} {found.st_mtime_ns}\n")
    return f"{folder.resolve()} {hashlib.sha256(os.fsencode(''.join(lines))).hexdigest()}"


def shown(text: str) -> str:
    """A name that any screen and any file takes, whatever bytes it is made of."""
    return text.encode(errors="backslashreplace").decode()


def isolated(function: Callable[..., Any], *arguments: Any, limit: float = 600) -> Any:
    """Call a function in a forked process, so that neither its imports nor its threads stay here."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def body() -> None:
        die_with_parent()
        try:
            sender.send((True, function(*arguments)))
        except UserError as error:
            sender.send((False, str(error)))
        except BaseException as error:  # noqa: BLE001 (the parent tells it)
            sender.send((False, f"{function.__name__} failed: {type(error).__name__}: {error}"))
        os._exit(0)

    process = context.Process(target=body)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            raise UserError(f"{function.__name__} took longer than {limit:.0f} s")
        good, value = receiver.recv()
        process.join(LINGER)
    except EOFError:
        raise UserError(f"{function.__name__} ended without an answer") from None
    finally:
        process.kill()
        process.join()
    if not good:
        raise UserError(value)
    return value
