"""Image sets as uint8 arrays, read from torchvision's files or drawn from a random stream.

Each reader returns train images, train labels, test images, test labels: images uint8 [N, H, W] or [N, 3, H, W],
labels [N]. The caller stores the result (common/data/prepare.py), so nothing is decoded twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common.core import network, seeds
from common.core.errors import UserError
from common.core.processes import die_with_parent
from common.runs.folder import disk_errors

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
MNIST_FILES = {  # uncompressed sizes in bytes
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
MAGIC = {"images": b"\0\0\x08\x03", "labels": b"\0\0\x08\x01"}  # uint8 in three dimensions, in one
LINGER = 5.0  # seconds for a process that has answered to exit


def generate_images(count: int, side: int, classes: int, seed: int) -> Arrays:
    """Draw random pixels [count, 3, side, side] with random labels: useless to learn from, realistic in step time.

    The test part has count // 5 samples.
    """

    def part(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        rng = seeds.make_generator(seed, "generated", name)
        labels = np.arange(size, dtype=np.int32) % classes  # every class is there
        return rng.integers(0, 256, (size, 3, side, side), dtype=np.uint8), rng.permutation(labels)

    return (*part("train", count), *part("test", max(1, count // 5)))


def generate_vectors(count: int, seed: int) -> Arrays:
    """Draw vectors [count, 10]; the class is the one of 5 fixed directions with the largest projection.

    The test part has count // 5 samples.
    """
    directions = seeds.make_generator(seed, "vectors", "directions").standard_normal((10, 5))

    def part(name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = seeds.make_generator(seed, "vectors", name).integers(0, 256, (size, 10), dtype=np.uint8)
        return numbers, ((numbers - 127.5) @ directions).argmax(1).astype(np.int32)

    return (*part("train", count), *part("test", max(1, count // 5)))


def download_dataset(name: str, root: Path, timeout: float) -> None:
    """Download torchvision's data set `name` into `root`; `timeout` in seconds for one silent connection."""
    from torchvision import datasets

    socket.setdefaulttimeout(timeout)
    getattr(datasets, name)(str(root), download=True)


@contextlib.contextmanager
def hold_folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, so that runs that start together download or prepare a set once."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(handle):
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def try_download(name: str, root: Path, folder: str, mirror: str, timeout: float) -> str:
    """Try to download torchvision's data set `name` into its `folder` in `root`; return why not, empty on success.

    `timeout` is in seconds for one silent connection; 0 forbids downloading.
    """
    if timeout == 0:
        return "data.download_timeout=0"
    silent = network.find_url_problem(mirror, timeout)
    if silent:
        return f"no connection: {silent}"
    print(f"downloading {folder} into {root}", flush=True)
    try:
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        with hold_folder_lock(root):
            if any((root / folder).glob("**/*.*")) or any((root / folder).glob("**/*-ubyte")):
                return ""  # another run was faster
            with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as beside:
                # the time-out is for one silent connection; a slow but steady download may take longer
                call_in_subprocess(download_dataset, name, Path(beside), timeout, limit=60 * timeout)
                shutil.copytree(Path(beside) / folder, root / folder, dirs_exist_ok=True)
    except (UserError, OSError, shutil.Error) as error:
        return str(error)
    return ""


def read_mnist(root: Path) -> Arrays:
    """Read MNIST: images uint8 [60000 or 10000, 28, 28], labels uint8 [60000 or 10000]."""
    from torchvision.datasets import MNIST

    train, test = MNIST(str(root), train=True), MNIST(str(root), train=False)
    labels = [part.targets.numpy().astype(np.uint8) for part in (train, test)]
    return train.data.numpy(), labels[0], test.data.numpy(), labels[1]


def check_mnist(raw: Path) -> None:
    """Raise UserError unless all four raw files of MNIST exist and are complete."""
    for name, size in MNIST_FILES.items():
        file = raw / name
        remedy = f"delete {raw} to download it again, or set data.root to a complete copy"
        if not file.exists():
            raise UserError(f"{file} is missing; {remedy}")
        if file.stat().st_size != size:
            raise UserError(f"{file} is damaged: {file.stat().st_size} bytes, expected {size}; {remedy}")
        with open(file, "rb") as opened:
            if opened.read(4) != MAGIC[name.split("-")[1]]:
                raise UserError(f"{file} is damaged: it does not begin like a file of MNIST; {remedy}")


def fingerprint_mnist(raw: Path) -> str:
    """Return a text that changes whenever a raw file is replaced."""
    stats = [(raw / name).stat() for name in MNIST_FILES]
    return " ".join([str(raw.resolve())] + [f"{s.st_size}:{s.st_mtime_ns}" for s in stats])


def read_cifar10(root: Path) -> Arrays:
    """Read CIFAR-10: images uint8 [50000 or 10000, 3, 32, 32], labels uint8; torchvision verifies the checksums."""
    from torchvision.datasets import CIFAR10

    train, test = CIFAR10(str(root), train=True), CIFAR10(str(root), train=False)
    images = [np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)) for part in (train, test)]
    labels = [np.asarray(part.targets, np.uint8) for part in (train, test)]
    return images[0], labels[0], images[1], labels[1]


def list_files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it and sorted.

    Links are followed, except back to a folder they lie in. Whatever is no folder counts as a file, broken links too.
    Raises UserError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{to_printable(str(error.filename))} cannot be listed ({error.strerror}); mend or remove it")

    found: list[str] = []
    # of each folder still to come: the real paths of it and of the folders above it
    within: dict[str, list[str]] = {str(folder): [os.path.realpath(folder)]}
    for path, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        above = within.pop(path)
        real = {name: os.path.realpath(f"{path}/{name}") for name in folders}
        folders[:] = [name for name in folders if not any(is_inside(outer, real[name]) for outer in above)]
        within |= {f"{path}/{name}": [*above, real[name]] for name in folders}
        found += [f"{path}/{name}"[len(f"{folder}/") :] for name in files]
    return sorted(found)


def is_inside(path: str, folder: str) -> bool:
    """Check whether a real path is the folder or below it."""
    return os.path.commonpath([path, folder]) == folder


def fingerprint_folder(folder: Path) -> str:
    """Return a text that changes whenever a file in the folder is added, removed or replaced."""
    lines = []
    for name in list_files(folder):
        try:
            found = (folder / name).stat()
        except OSError as error:
            lines.append(f"{name} cannot be read: {error.errno}\n")
        else:
            lines.append(f"{name} {found.st_size} {found.st_mtime_ns}\n")
    return f"{folder.resolve()} {hashlib.sha256(os.fsencode(''.join(lines))).hexdigest()}"


def to_printable(text: str) -> str:
    """Escape the bytes of a file name that are not valid text, so that it can be printed and written anywhere."""
    return text.encode(errors="backslashreplace").decode()


def call_in_subprocess(
    function: Callable[..., Any],
    *arguments: Any,
    limit: float = 600,
    show: Callable[[int, int], None] | None = None,
) -> Any:
    """Call a function in a forked process and return its value; its imports and threads end with that process.

    With `show` the function gets one more argument, a function `report(done, total)`, and each report is shown here.

    Raises UserError if the function fails, or takes longer than `limit` seconds.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def body() -> None:
        die_with_parent()
        reports = () if show is None else (lambda done, total: sender.send((None, (done, total))),)
        try:
            sender.send((True, function(*arguments, *reports)))
        except UserError as error:
            sender.send((False, str(error)))
        except BaseException as error:  # noqa: BLE001 (the parent reports it)
            sender.send((False, f"{function.__name__} failed: {type(error).__name__}: {error}"))
        os._exit(0)

    process = context.Process(target=body)
    process.start()
    sender.close()
    end = time.monotonic() + limit
    try:
        good = None
        while good is None:
            if not receiver.poll(max(0, end - time.monotonic())):
                raise UserError(f"{function.__name__} took longer than {limit:.0f} s")
            good, value = receiver.recv()
            if good is None and show is not None:
                show(*value)
        process.join(LINGER)
    except EOFError:
        raise UserError(f"{function.__name__} ended without an answer") from None
    finally:
        process.kill()
        process.join()
    if not good:
        raise UserError(value)
    return value
