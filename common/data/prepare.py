"""Preparation of a data set, once and before any rank starts, as uint8 arrays that every rank maps into memory.

Imports torchvision only to read or download raw files, and then in a process of its own: a set that is prepared
already costs no import, and a download that hangs can be ended.
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
from common.core.own_function import locate_errors, locate_function_file, prefer_kept
from common.data import image_folder, own_data, sources, synthetic_digits
from common.data.sources import Arrays
from common.runs.folder import disk_errors, read_json
from common.runs.progress import Screen
from configs.shared import Data, Experiment, Log

MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/train-labels-idx1-ubyte.gz"
CIFAR_MIRROR = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR_FOLDER = "cifar-10-batches-py"
PARTS = ("train_images", "train_labels", "test_images", "test_labels")
DATA_SEED = 0  # of drawn sets, the same for every run: `seed` sets initialisation and order, not the data
DIGITS_VERSION = 1
FOLDER_VERSION = 2  # raise these when the same settings and files would give other arrays than before


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared data set on disk: its name, its folder, and the SHA-256 of each array."""

    name: str
    path: Path
    sha256: dict[str, str]
    notice: str = ""

    def map_array(self, part: str) -> np.ndarray:
        """Map one of PARTS into memory, copy on write; ranks on one host share the pages. Shapes: see sources.py."""
        return np.load(self.path / f"{part}.npy", mmap_mode="c")

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes in the order of their labels; None if the set has none."""
        try:
            return [str(name) for name in json.loads((self.path / image_folder.CLASSES).read_text())]
        except (OSError, ValueError, TypeError):
            return None

    @property
    def statistics(self) -> tuple[Any, Any] | None:
        """Mean and standard deviation of the training images, of each colour or of all, where they are stored."""
        known = read_json(self.path / own_data.STATISTICS)
        return (known["mean"], known["std"]) if known.keys() >= {"mean", "std"} else None

    def copy_own_data_file(self, code: Path) -> None:
        """Copy the file of a set of one's own into the source of a run, which reads it there. Raises UserError."""
        if (self.path / own_data.SOURCE).is_file():
            with disk_errors(code):
                (code / own_data.KEPT).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path / own_data.SOURCE, code / own_data.KEPT)

    def verify_checksums(self) -> None:
        """Raise UserError if an array has changed since it was prepared."""
        for part, expected in self.sha256.items():
            file = self.path / f"{part}.npy"
            if hash_file(file) != expected:
                raise UserError(f"{file} is damaged (checksum differs); delete {self.path} and start again")

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of meta.json on the set."""
        return {"name": self.name, "path": str(self.path), "sha256": self.sha256}


NO_DATA = Prepared("none", Path(os.devnull), {})
"""What a run that trains nothing has in the place of a set."""


def prepare_dataset(data: Data, fallback: bool = True, log: Log | None = None, code: Path | None = None) -> Prepared:
    """Find or make the set that `data` asks for; digits replace a missing MNIST if `fallback` and the config allow it.

    The progress of what takes long is shown as `log` asks, without it not at all. `code` is the source of the run that
    has this set already: the file of a set of one's own is read there.

    Raises UserError, naming the remedy, for missing or damaged files and for a disk that cannot be written.
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
    return prepare_own_set(data, code) if ":" in data.name else prepare_mnist(data, fallback)


def check_model_fits_data(cfg: Experiment, found: Prepared) -> None:
    """Raise UserError where the model of a config does not take the samples of a set."""
    if not cfg.trains:
        return
    try:
        cfg.check_shape(found.map_array("train_images").shape[1:])
    except ValueError as error:
        raise UserError(str(error)) from None


def prepare_mnist(data: Data, fallback: bool) -> Prepared:
    """Find or make MNIST, downloading it if it is missing; only the default folder may lack it. Raises UserError."""
    root = Path(data.root)
    is_given = data.root not in (Data.root, os.environ.get("DATA_ROOT"))  # without MNIST it is mistyped, most likely
    if is_given and not root.is_dir():
        remedy = "name a folder with MNIST/raw, make this one to download MNIST into it, or set data.name=digits"
        raise UserError(f"data.root={root}: there is no such folder; {remedy}")
    raw = root / "MNIST" / "raw"
    notice = ""
    if not any((raw / name).exists() for name in sources.MNIST_FILES):
        problem = sources.try_download("MNIST", root, "MNIST", MNIST_MIRROR, data.download_timeout)
        if problem:
            notice = f"MNIST is not in the folder {root} and cannot be downloaded ({problem})"
            if is_given or data.fallback == "none" or not fallback:
                raise UserError(f"{notice}; set data.root to a folder with MNIST/raw, or data.name=digits")
            notice += ": training on the built-in digits set instead"
            return dataclasses.replace(prepare_digits(Path(data.cache)), notice=notice)
    sources.check_mnist(raw)
    state = sources.fingerprint_mnist(raw)
    return find_or_store_arrays(
        Path(data.cache), "mnist", state, lambda: sources.call_in_subprocess(sources.read_mnist, root)
    )


def prepare_digits(cache: Path) -> Prepared:
    """Find or draw the built-in digits: 60,000 for training and 10,000 for the test, as MNIST has."""

    def make() -> Arrays:
        train, test = (
            synthetic_digits.generate_digits(count, DATA_SEED, part)
            for part, count in (("train", 60_000), ("test", 10_000))
        )
        return *train, *test

    return find_or_store_arrays(cache, "digits", f"seed {DATA_SEED} version {DIGITS_VERSION}", make)


def prepare_generated(data: Data) -> Prepared:
    """Find or draw `data.samples` images of random pixels, or vectors."""
    cache, count = Path(data.cache), data.samples
    if data.name == "vectors":
        state = f"seed {DATA_SEED} samples {count}"
        return find_or_store_arrays(cache, "vectors", state, lambda: sources.generate_vectors(count, DATA_SEED))
    sizes = count, data.image_size, data.classes
    state = f"seed {DATA_SEED} sizes {sizes}"
    made = find_or_store_arrays(cache, "generated", state, lambda: sources.generate_images(*sizes, DATA_SEED))
    return dataclasses.replace(made, notice="generated images: random pixels and labels, good for throughput only")


def prepare_cifar10(data: Data) -> Prepared:
    """Find or make CIFAR-10, downloading it if it is missing. Raises UserError."""
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


def prepare_image_folder(data: Data, log: Log) -> Prepared:
    """Find or make the set of an image folder (see image_folder.py). Raises UserError."""
    root = Path(data.root)
    absent = [name for name in ("train", "val") if not (root / name).is_dir()]
    if absent:
        raise UserError(
            f"{root / absent[0]} is missing; set data.root to a folder with train/<class>/* and val/<class>/*, "
            "or data.name=generated"
        )
    state = f"{sources.fingerprint_folder(root / 'train')} {sources.fingerprint_folder(root / 'val')} {data.image_size}"
    state += f" version {FOLDER_VERSION}"
    state += " skip" if data.unreadable == "skip" else ""  # changing the setting reads again what was left out

    def write(beside: Path) -> str:
        how = (root, beside, data.image_size, data.unreadable, DATA_SEED)
        with contextlib.closing(Screen(log, silent=False)) as screen:
            show = functools.partial(screen.show_progress, "preparation")
            show(0, 0)  # before the files are counted
            return str(
                sources.call_in_subprocess(image_folder.write_folder_as_arrays, *how, limit=24 * 3600, show=show)
            )

    made = find_or_make_set(Path(data.cache), "imagefolder", state, write)
    listed = made.path / image_folder.LEFT_OUT
    more = f"; all of them: {sources.to_printable(str(listed))}" if listed.exists() else ""
    return dataclasses.replace(made, notice=made.notice + more)


def prepare_own_set(data: Data, code: Path | None) -> Prepared:
    """Find or make the set that `FILE.py:function` returns (see own_data.py). Raises UserError."""
    value, root = prefer_kept(data.name, code and code / own_data.KEPT), Path(data.root)
    file = Path(locate_function_file("data.name", value, own_data.KNOWN))
    with locate_errors("data.name", value):
        state = f"{hash_file(file)} {value.rpartition(':')[2]} {root.resolve()}"

    def write(beside: Path) -> str:
        files = [beside / f"{part}.npy" for part in PARTS]
        return str(sources.call_in_subprocess(own_data.write_arrays, value, root, files, limit=24 * 3600))

    return dataclasses.replace(find_or_make_set(Path(data.cache), "own", state, write), name=data.name)


def find_or_store_arrays(cache: Path, name: str, state: str, make: Callable[[], Arrays]) -> Prepared:
    """Find the set prepared from a state of its source, or store the arrays that `make` returns. Raises UserError."""

    def write(folder: Path) -> str:
        for part, array in zip(PARTS, make(), strict=True):
            with disk_errors(folder.parent):
                np.save(folder / f"{part}.npy", array)
        return ""

    return find_or_make_set(cache, name, state, write)


def find_or_make_set(cache: Path, name: str, state: str, write: Callable[[Path], str]) -> Prepared:
    """Find the set prepared from a state of its source, or make it under a lock.

    `write` saves an array for each of PARTS into a folder, and returns a notice that every run with this set shows.
    """
    path = cache / f"{name}-{hashlib.sha256(os.fsencode(state)).hexdigest()[:12]}"
    if read_prepared(name, path) is None:
        with sources.hold_folder_lock(cache):
            if read_prepared(name, path) is None:  # another run may have been faster
                write_prepared(path, write)
    found = read_prepared(name, path)
    assert found is not None
    return found


def read_prepared(name: str, path: Path) -> Prepared | None:
    """Return the prepared set in a folder, or None unless it is complete."""
    manifest = read_json(path / "manifest.json")
    sizes, hashes = manifest.get("bytes"), manifest.get("sha256")
    if not (isinstance(sizes, dict) and isinstance(hashes, dict) and set(sizes) == set(hashes) == set(PARTS)):
        return None
    for part, size in sizes.items():
        file = path / f"{part}.npy"
        if not file.exists() or file.stat().st_size != size:
            return None
    return Prepared(name, path.resolve(), hashes, str(manifest.get("notice", "")))


def write_prepared(path: Path, write: Callable[[Path], str]) -> None:
    """Write all arrays to a temporary folder, then rename it: atomic. The caller holds the cache's lock."""
    host = socket.gethostname()  # on some network disks a lock holds on one host only
    for left in path.parent.glob(f".{path.name.rpartition('-')[0]}-*-{host}-*"):
        shutil.rmtree(left, ignore_errors=True)  # of a killed run: no other writer holds the lock
    with disk_errors(path):
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}-{host}-", dir=path.parent))
    beside = path.parent / made.name  # as the user wrote it; from Python 3.12 on mkdtemp returns an absolute path
    try:
        notice = write(beside)
        with disk_errors(path):
            files = {part: beside / f"{part}.npy" for part in PARTS}
            manifest = {
                "bytes": {part: file.stat().st_size for part, file in files.items()},
                "sha256": {part: hash_file(file) for part, file in files.items()},
                "notice": notice,
            }
            (beside / "manifest.json").write_text(json.dumps(manifest, indent=2))
            beside.chmod(0o755)
            shutil.rmtree(path, ignore_errors=True)
            beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def hash_file(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
