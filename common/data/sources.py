"""Sources of data sets: files in torchvision's formats, downloads, and generated random data.

A function that reads or generates a data set returns four arrays: train images, train labels, test images and test
labels. Images are uint8 [N, H, W] or [N, 3, H, W], vectors are uint8 [N, D], and labels are integers [N].
common/data/prepare.py stores the arrays, so that the files are decoded only once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common.runs.folder import convert_disk_errors
from common.system import network, seeds
from common.system.causes import Cause
from common.system.errors import UserError

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
MNIST_FILES = {  # uncompressed size of each file in bytes
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
# First four bytes of a file, which encode the data type (uint8) and the number of dimensions.
MAGIC = {"images": b"\0\0\x08\x03", "labels": b"\0\0\x08\x01"}
CLASSES_FILE = "classes.json"  # contains the names of the classes, in the order of their labels
STATISTICS_FILE = "statistics.json"  # mean and standard deviation of the training pixels, per channel for color images
TEXT_FILE = "text.json"  # facts about a text: vocabulary, checksum, and losses of n-gram models
DESCRIPTION = "description"  # array with the JSON text that describes map-style data sets, which have no other arrays
ROOT_FILE = "root.json"  # folder of map-style data sets, which does not belong to their checksum
SOURCE_FILE = "source.py"  # copy of the user's file of a custom data set, stored next to the arrays
RUN_SOURCE_FILE = Path("own", "data.py")  # copy of the user's file in the source folder of a run
TOKENIZER_FILE = "tokenizer.json"  # copy of the tokenizer of a text, stored next to the arrays
RUN_TOKENIZER_FILE = Path("own", "tokenizer.json")  # copy of the tokenizer in the source folder of a run
SKIPPED_FILE = "left_out.txt"  # lists the skipped files of an image folder


def generate_images(count: int, side: int, classes: int, seed: int) -> Arrays:
    """Generate images [count, 3, side, side] with random pixels and random labels, for measuring step times.

    The test part has count // 5 samples, but at least one. Raises UserError if the memory is too small.
    """
    from common.system import host_memory  # other data sets do not need this module

    needed = 1.2 * count * 3 * side * side
    available, _ = host_memory.measure_available_memory()
    if needed > available:
        raise UserError(
            f"{count} images of {side} x {side} pixels need {needed / 1e6:,.0f} MB, but {available / 1e6:,.0f} MB of "
            "memory are available; lower data.samples or data.image_size"
        )

    def generate_part(part: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        rng = seeds.make_generator(seed, "generated", part)
        images = rng.integers(0, 256, (size, 3, side, side), dtype=np.uint8)
        labels = np.arange(size, dtype=np.int32) % classes  # each class occurs about equally often
        return images, rng.permutation(labels)

    return *generate_part("train", count), *generate_part("test", max(1, count // 5))


def generate_vectors(count: int, seed: int) -> Arrays:
    """Generate random vectors [count, 10] with labels from 0 to 4.

    The label is the index of the direction, among five fixed directions, on which the centered vector has the largest
    projection. The test part has count // 5 samples, but at least one.
    """
    directions = seeds.make_generator(seed, "vectors", "directions").standard_normal((10, 5))

    def generate_part(part: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        vectors = seeds.make_generator(seed, "vectors", part).integers(0, 256, (size, 10), dtype=np.uint8)
        labels = ((vectors - 127.5) @ directions).argmax(1)
        return vectors, labels.astype(np.int32)

    return *generate_part("train", count), *generate_part("test", max(1, count // 5))


def download_dataset(name: str, root: Path, timeout: float) -> None:
    """Download torchvision's data set `name` into the folder `root`.

    The download fails if the connection receives no data for `timeout` seconds.
    """
    from torchvision import datasets

    socket.setdefaulttimeout(timeout)
    getattr(datasets, name)(str(root), download=True)


@contextlib.contextmanager
def hold_folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that concurrent runs download or prepare a data set only once."""
    with convert_disk_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(handle):
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def try_download(name: str, root: Path, folder: str, mirror: str, timeout: float) -> str:
    """Download torchvision's data set `name` to root/folder.

    Returns an empty string on success, otherwise a description of the problem. The download fails if the connection
    receives no data for `timeout` seconds; 0 disables downloads.
    """
    if timeout == 0:
        return "data.download_timeout=0"
    problem = network.explain_unreachable_url(mirror, timeout)
    if problem:
        return f"no connection: {problem}"
    print(f"downloading {folder} into {root}", flush=True)
    try:
        with convert_disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        with hold_folder_lock(root):
            target = root / folder
            if any(target.glob("**/*.*")) or any(target.glob("**/*-ubyte")):
                return ""  # another run has downloaded the data set while this run was waiting for the lock
            with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as temporary:
                # A slow but steady download may take much longer than the timeout of a silent connection.
                call_in_subprocess(download_dataset, name, Path(temporary), timeout, limit=60 * timeout)
                shutil.copytree(Path(temporary) / folder, target, dirs_exist_ok=True)
    except (UserError, OSError, shutil.Error) as error:
        return str(error)
    return ""


def read_mnist(root: Path) -> Arrays:
    """Read MNIST: uint8 images [N, 28, 28] and uint8 labels [N], with N = 60000 (train) and 10000 (test)."""
    from torchvision.datasets import MNIST

    train = MNIST(str(root), train=True)
    test = MNIST(str(root), train=False)
    train_labels = train.targets.numpy().astype(np.uint8)
    test_labels = test.targets.numpy().astype(np.uint8)
    return train.data.numpy(), train_labels, test.data.numpy(), test_labels


def check_mnist(raw: Path) -> None:
    """Raise UserError if any of the four raw files of MNIST is missing or damaged."""
    for name, size in MNIST_FILES.items():
        file = raw / name
        remedy = f"delete {raw} to download it again, or set data.root to a complete copy"
        if not file.exists():
            raise UserError(f"{file} is missing; {remedy}")
        if file.stat().st_size != size:
            problem = f"{file} is damaged: {file.stat().st_size} bytes, expected {size}; {remedy}"
            raise UserError(problem, cause=Cause.DAMAGED_DATA)
        with open(file, "rb") as opened:
            if opened.read(4) != MAGIC[name.split("-")[1]]:
                problem = f"{file} is damaged: it does not start with the header of an MNIST file; {remedy}"
                raise UserError(problem, cause=Cause.DAMAGED_DATA)


def fingerprint_mnist(raw: Path) -> str:
    """Return a string that changes whenever a raw file of MNIST is replaced."""
    parts = [str(raw.resolve())]
    for name in MNIST_FILES:
        status = (raw / name).stat()
        parts.append(f"{status.st_size}:{status.st_mtime_ns}")
    return " ".join(parts)


def read_cifar10(root: Path) -> Arrays:
    """Read CIFAR-10: uint8 images [N, 3, 32, 32] and uint8 labels [N], with N = 50000 (train) and 10000 (test).

    torchvision verifies the checksums of the files.
    """
    from torchvision.datasets import CIFAR10

    def read_part(train: bool) -> tuple[np.ndarray, np.ndarray]:
        part = CIFAR10(str(root), train=train)
        images = np.ascontiguousarray(part.data.transpose(0, 3, 1, 2))
        return images, np.asarray(part.targets, np.uint8)

    return *read_part(train=True), *read_part(train=False)


def list_files(folder: Path) -> list[str]:
    """Return the sorted paths of all files below a folder, relative to this folder.

    Symbolic links are followed, except links to a folder that contains the link itself. Everything that is not a folder
    counts as a file, including broken links. Raises UserError if a folder cannot be listed.
    """

    def raise_user_error(error: OSError) -> None:
        """Convert an error of os.walk to a UserError."""
        name = make_printable(str(error.filename))
        raise UserError(f"cannot list the files in {name} ({error.strerror}); repair or remove this folder")

    relative_paths: list[str] = []
    real_parents = {str(folder): [os.path.realpath(folder)]}  # real paths of each pending folder and of its parents
    for path, folders, files in os.walk(folder, followlinks=True, onerror=raise_user_error):
        parents = real_parents.pop(path)
        for name in list(folders):
            real_path = os.path.realpath(f"{path}/{name}")
            if any(is_inside(parent, real_path) for parent in parents):  # os.walk would follow this link forever
                folders.remove(name)
            else:
                real_parents[f"{path}/{name}"] = [*parents, real_path]
        for name in files:
            relative_paths.append(f"{path}/{name}".removeprefix(f"{folder}/"))
    return sorted(relative_paths)


def is_inside(path: str, folder: str) -> bool:
    """Return True if a real path is the folder itself or a path below it."""
    return os.path.commonpath([path, folder]) == folder


def fingerprint_folder(folder: Path) -> str:
    """Return a string that changes whenever a file in the folder is added, removed or replaced."""
    lines = []
    for name in list_files(folder):
        try:
            status = (folder / name).stat()
        except OSError as error:
            lines.append(f"{name} cannot be read: {error.errno}\n")
        else:
            lines.append(f"{name} {status.st_size} {status.st_mtime_ns}\n")
    listing = os.fsencode("".join(lines))
    return f"{folder.resolve()} {hashlib.sha256(listing).hexdigest()}"


def make_printable(text: str) -> str:
    """Escape the bytes of a file name that are not valid text, so that the file name can be printed."""
    return text.encode(errors="backslashreplace").decode()


def call_in_subprocess(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in a forked process and return its value; see subprocess_call.py."""
    from common.data import subprocess_call  # runs whose data is already prepared do not need this module

    return subprocess_call.call_in_subprocess(function, *arguments, **options)
