"""Preparation of a data set, once and before any rank starts, as uint8 arrays that every rank maps into memory.

torchvision is imported only to read or download raw files, and then in a subprocess: a prepared set needs no import,
and a download that hangs can be killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.core.errors import UserError
from common.core.own_function import locate_errors, locate_function_file, prefer_file_copy
from common.data import image_folder, own_data, sources, synthetic_digits
from common.data.sources import Arrays
from common.runs.folder import disk_errors, read_json
from common.runs.progress import ProgressDisplay
from configs.shared import Data, Experiment, Log

MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/train-labels-idx1-ubyte.gz"
CIFAR_MIRROR = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR_FOLDER = "cifar-10-batches-py"
PARTS = ("train_images", "train_labels", "test_images", "test_labels")
DATA_SEED = 0  # of drawn sets, equal for all runs: `seed` sets initialisation and order, not the data
# Raise a version when the same settings and files give different arrays than before.
DIGITS_VERSION = 1
FOLDER_VERSION = 2
READ_TIMEOUT = 24 * 3600.0  # seconds for reading an image folder or a custom set


@dataclasses.dataclass(frozen=True)
class PreparedDataset:
    """A prepared data set on disk: its name, its folder, and the SHA-256 of each array."""

    name: str
    path: Path
    sha256: dict[str, str]
    notice: str = ""

    def map_array(self, part: str) -> np.ndarray:
        """Map one of PARTS into memory, copy on write; ranks on a host share the pages. Shapes: see sources.py."""
        return np.load(self.path / f"{part}.npy", mmap_mode="c")

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes in the order of their labels; None if the set has none."""
        try:
            names = json.loads((self.path / image_folder.CLASSES_FILE).read_text())
            return [str(name) for name in names]
        except (OSError, ValueError, TypeError):
            return None

    @property
    def statistics(self) -> tuple[Any, Any] | None:
        """Mean and standard deviation of the training images, of each colour or of all, if they are stored."""
        statistics = read_json(self.path / own_data.STATISTICS_FILE)
        if statistics.keys() >= {"mean", "std"}:
            return statistics["mean"], statistics["std"]
        return None

    def copy_user_data_file(self, code: Path) -> None:
        """Copy the user's file of a custom set into the source of a run. Raises UserError."""
        source = self.path / own_data.SOURCE_FILE
        if source.is_file():
            target = code / own_data.RUN_SOURCE_FILE
            with disk_errors(code):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def verify_checksums(self) -> None:
        """Raise UserError if an array has changed since it was prepared."""
        for part, expected in self.sha256.items():
            file = self.path / f"{part}.npy"
            if hash_file(file) != expected:
                raise UserError(f"{file} is damaged (checksum differs); delete {self.path} and start again")

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of meta.json that describe the set."""
        return {"name": self.name, "path": str(self.path), "sha256": self.sha256}


NO_DATA = PreparedDataset("none", Path(os.devnull), {})
"""The data set of a run that trains nothing."""


def prepare_dataset(
    data: Data, fallback: bool = True, log: Log | None = None, code: Path | None = None
) -> PreparedDataset:
    """Find or prepare the set of `data`; digits replace a missing MNIST if `fallback` and the config allow it.

    The progress of long preparations is shown as set in `log`; without `log` it is hidden. `code` is the source of the
    run that resumes: the user's file of a custom set is read from there.

    Raises UserError, with the remedy, for missing or damaged files and for a disk that cannot be written.
    """
    match data.name:
        case "none":
            return NO_DATA
        case "digits":
            return prepare_digits(Path(data.cache))
        case "generated" | "vectors":
            return prepare_generated(data)
        case "cifar10":
            return prepare_cifar10(data)
        case "imagefolder":
            return prepare_image_folder(data, log or Log(progress="none"))
    return prepare_custom_set(data, code) if ":" in data.name else prepare_mnist(data, fallback)


def check_model_fits_data(cfg: Experiment, prepared: PreparedDataset) -> None:
    """Raise UserError if the model of a config does not accept the samples of a set."""
    if not cfg.trains:
        return
    try:
        cfg.check_shape(prepared.map_array("train_images").shape[1:])
    except ValueError as error:
        raise UserError(str(error)) from None


def prepare_mnist(data: Data, fallback: bool) -> PreparedDataset:
    """Find or prepare MNIST; download it if it is missing. Raises UserError.

    Digits replace it only if data.root is the default: another folder without MNIST is most likely a typing error.
    """
    root = Path(data.root)
    cache = Path(data.cache)
    is_default_root = data.root in (Data.root, os.environ.get("DATA_ROOT"))
    if not is_default_root and not root.is_dir():
        remedy = "name a folder with MNIST/raw, make this one to download MNIST into it, or set data.name=digits"
        raise UserError(f"data.root={root}: there is no such folder; {remedy}")
    raw = root / "MNIST" / "raw"
    if not any((raw / name).exists() for name in sources.MNIST_FILES):
        problem = sources.try_download("MNIST", root, "MNIST", MNIST_MIRROR, data.download_timeout)
        if problem:
            notice = f"MNIST is not in the folder {root} and cannot be downloaded ({problem})"
            if not is_default_root or data.fallback == "none" or not fallback:
                raise UserError(f"{notice}; set data.root to a folder with MNIST/raw, or data.name=digits")
            notice += ": training on the built-in digits set instead"
            return dataclasses.replace(prepare_digits(cache), notice=notice)
    sources.check_mnist(raw)
    state = sources.fingerprint_mnist(raw)
    return find_or_store_arrays(cache, "mnist", state, lambda: sources.call_in_subprocess(sources.read_mnist, root))


def prepare_digits(cache: Path) -> PreparedDataset:
    """Find or draw the built-in digits: 60,000 for training and 10,000 for the test, like MNIST."""

    def draw() -> Arrays:
        train = synthetic_digits.generate_digits(60_000, DATA_SEED, "train")
        test = synthetic_digits.generate_digits(10_000, DATA_SEED, "test")
        return *train, *test

    return find_or_store_arrays(cache, "digits", f"seed {DATA_SEED} version {DIGITS_VERSION}", draw)


def prepare_generated(data: Data) -> PreparedDataset:
    """Find or draw `data.samples` images of random pixels, or vectors."""
    cache = Path(data.cache)
    if data.name == "vectors":
        state = f"seed {DATA_SEED} samples {data.samples}"
        return find_or_store_arrays(cache, "vectors", state, lambda: sources.generate_vectors(data.samples, DATA_SEED))
    sizes = (data.samples, data.image_size, data.classes)
    state = f"seed {DATA_SEED} sizes {sizes}"
    prepared = find_or_store_arrays(cache, "generated", state, lambda: sources.generate_images(*sizes, DATA_SEED))
    notice = "generated images: random pixels and labels, suitable for measuring throughput only"
    return dataclasses.replace(prepared, notice=notice)


def prepare_cifar10(data: Data) -> PreparedDataset:
    """Find or prepare CIFAR-10; download it if it is missing. Raises UserError."""
    root = Path(data.root)
    remedy = f"set data.root to a folder with {CIFAR_FOLDER}, or data.name=generated"
    if not (root / CIFAR_FOLDER).exists():
        problem = sources.try_download("CIFAR10", root, CIFAR_FOLDER, CIFAR_MIRROR, data.download_timeout)
        if problem:
            raise UserError(f"CIFAR-10 is not in the folder {root} and cannot be downloaded ({problem}); {remedy}")
    state = sources.fingerprint_folder(root / CIFAR_FOLDER)
    try:
        return find_or_store_arrays(
            Path(data.cache), "cifar10", state, lambda: sources.call_in_subprocess(sources.read_cifar10, root)
        )
    except UserError as error:
        raise UserError(f"{error}; delete {root / CIFAR_FOLDER} to download it again, {remedy}") from None


def prepare_image_folder(data: Data, log: Log) -> PreparedDataset:
    """Find or prepare the set of an image folder (see image_folder.py). Raises UserError."""
    root = Path(data.root)
    train = root / "train"
    val = root / "val"
    for folder in (train, val):
        if not folder.is_dir():
            remedy = "set data.root to a folder with train/<class>/* and val/<class>/*, or data.name=generated"
            raise UserError(f"{folder} is missing; {remedy}")
    state = f"{sources.fingerprint_folder(train)} {sources.fingerprint_folder(val)} {data.image_size}"
    state += f" version {FOLDER_VERSION}"
    if data.unreadable == "skip":  # another setting reads the skipped files again
        state += " skip"

    def write(folder: Path) -> str:
        with contextlib.closing(ProgressDisplay(log, silent=False)) as screen:
            show = functools.partial(screen.show_progress, "preparation")
            show(0, 0)  # until the files are counted
            function = image_folder.write_folder_as_arrays
            settings = (root, folder, data.image_size, data.unreadable, DATA_SEED)
            return str(sources.call_in_subprocess(function, *settings, limit=READ_TIMEOUT, show=show))

    prepared = find_or_make_set(Path(data.cache), "imagefolder", state, write)
    skipped = prepared.path / image_folder.SKIPPED_FILE
    if not skipped.exists():
        return prepared
    notice = f"{prepared.notice}; all of them: {sources.make_printable(str(skipped))}"
    return dataclasses.replace(prepared, notice=notice)


def prepare_custom_set(data: Data, code: Path | None) -> PreparedDataset:
    """Find or prepare the set that `FILE.py:function` returns (see own_data.py). Raises UserError."""
    function = prefer_file_copy(data.name, code and code / own_data.RUN_SOURCE_FILE)
    file = Path(locate_function_file("data.name", function, own_data.SET_NAMES))
    root = Path(data.root)
    with locate_errors("data.name", function):
        state = f"{hash_file(file)} {function.rpartition(':')[2]} {root.resolve()}"

    def write(folder: Path) -> str:
        files = [folder / f"{part}.npy" for part in PARTS]
        return str(sources.call_in_subprocess(own_data.write_arrays, function, root, files, limit=READ_TIMEOUT))

    prepared = find_or_make_set(Path(data.cache), "own", state, write)
    return dataclasses.replace(prepared, name=data.name)


def find_or_store_arrays(cache: Path, name: str, state: str, make_arrays: Callable[[], Arrays]) -> PreparedDataset:
    """Find the set prepared from this state of its source, or store the arrays of `make_arrays`. Raises UserError."""

    def write(folder: Path) -> str:
        for part, array in zip(PARTS, make_arrays(), strict=True):
            with disk_errors(folder.parent):
                np.save(folder / f"{part}.npy", array)
        return ""

    return find_or_make_set(cache, name, state, write)


def find_or_make_set(cache: Path, name: str, state: str, write: Callable[[Path], str]) -> PreparedDataset:
    """Find the set prepared from this state of its source, or make it under a lock.

    `write` saves an array for each of PARTS into a folder, and returns a notice that every run with this set shows.
    """
    path = cache / f"{name}-{hashlib.sha256(os.fsencode(state)).hexdigest()[:12]}"
    if read_prepared(name, path) is None:
        with sources.hold_folder_lock(cache):
            if read_prepared(name, path) is None:  # no other run has made it while this one waited for the lock
                write_prepared(path, write)
    prepared = read_prepared(name, path)
    assert prepared is not None
    return prepared


def read_prepared(name: str, path: Path) -> PreparedDataset | None:
    """Return the prepared set in a folder, or None if it is incomplete."""
    manifest = read_json(path / "manifest.json")
    sizes = manifest.get("bytes")
    hashes = manifest.get("sha256")
    if not isinstance(sizes, dict) or not isinstance(hashes, dict):
        return None
    if not set(sizes) == set(hashes) == set(PARTS):
        return None
    for part, size in sizes.items():
        file = path / f"{part}.npy"
        if not file.exists() or file.stat().st_size != size:
            return None
    return PreparedDataset(name, path.resolve(), hashes, str(manifest.get("notice", "")))


def write_prepared(path: Path, write: Callable[[Path], str]) -> None:
    """Write all arrays to a temporary folder, then rename it atomically. The caller holds the cache's lock."""
    host = socket.gethostname()  # on some network disks a lock is valid on one host only
    name = path.name
    for leftover in path.parent.glob(f".{name.rpartition('-')[0]}-*-{host}-*"):  # of killed runs
        shutil.rmtree(leftover, ignore_errors=True)
    with disk_errors(path):
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-{host}-", dir=path.parent))
    folder = path.parent / temporary.name  # relative if `path` is: from Python 3.12 mkdtemp returns an absolute path
    try:
        notice = write(folder)
        with disk_errors(path):
            files = {part: folder / f"{part}.npy" for part in PARTS}
            manifest = {
                "bytes": {part: file.stat().st_size for part, file in files.items()},
                "sha256": {part: hash_file(file) for part, file in files.items()},
                "notice": notice,
            }
            (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
            folder.chmod(0o755)
            shutil.rmtree(path, ignore_errors=True)
            folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def hash_file(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
