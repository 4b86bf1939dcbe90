"""Preparing a data set once, before any process starts, as uint8 arrays that every process maps.

Imports torchvision only when raw files have to be read or downloaded, and then in a process of its
own: a set that is prepared already costs no import, and a download that hangs can be ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common.core import network
from common.core.errors import UserError
from common.data import image_folder, sources, synthetic_digits
from common.data.sources import Arrays
from common.runs.folder import disk_errors, read_json
from configs.shared import Data

MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/train-labels-idx1-ubyte.gz"
CIFAR_MIRROR = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR_FOLDER = "cifar-10-batches-py"
RAW = {  # uncompressed sizes in bytes
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
MAGIC = {"images": b"\0\0\x08\x03", "labels": b"\0\0\x08\x01"}  # uint8 in three dimensions, in one
PARTS = ("train_images", "train_labels", "test_images", "test_labels")
DATA_SEED = 0  # a drawn set is the same for every run: `seed` chooses initialisation and order, not the data
DIGITS_VERSION = 1
FOLDER_VERSION = 2  # raise these when the same settings and files would give other arrays than before


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A data set on disk: its real name, its folder, and the checksum of each array."""

    name: str
    path: Path
    sha256: dict[str, str]
    notice: str = ""

    def array(self, part: str) -> np.ndarray:
        """One of PARTS, memory-mapped: processes on one host share the pages."""
        return np.load(self.path / f"{part}.npy", mmap_mode="c")

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, in the order of their labels, where the set has names."""
        try:
            return [str(name) for name in json.loads((self.path / image_folder.CLASSES).read_text())]
        except (OSError, ValueError, TypeError):
            return None

    def verify(self) -> None:
        """Raise UserError if an array changed since it was prepared."""
        for part, expected in self.sha256.items():
            file = self.path / f"{part}.npy"
            if file_hash(file) != expected:
                raise UserError(f"{file} is damaged (checksum differs); delete {self.path} and start again")

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "path": str(self.path), "sha256": self.sha256}


def prepare(data: Data, fallback: bool = True) -> Prepared:
    """Find or make the set that `data` asks for; falls back to digits only if `fallback` and the settings allow it.

    Raises UserError, naming the remedy, for missing or damaged files and for a disk that cannot be written.
    """
    match data.name:
        case "digits":
            return prepare_digits(Path(data.cache))
        case "generated":
            return prepare_generated(data)
        case "vectors":
            state = f"seed {DATA_SEED} samples {data.samples}"
            return cached(Path(data.cache), "vectors", state, saved(lambda: sources.vectors(data.samples, DATA_SEED)))
        case "cifar10":
            return prepare_cifar10(data)
        case "imagefolder":
            return prepare_folder(data)
    return prepare_mnist(data, fallback)


def prepare_mnist(data: Data, fallback: bool) -> Prepared:
    root = Path(data.root)
    raw = root / "MNIST" / "raw"
    notice = ""
    if not any((raw / name).exists() for name in RAW):
        problem = obtain(root, "MNIST", MNIST_MIRROR, sources.download_mnist, data.download_timeout)
        if problem:
            notice = f"MNIST is not under {root} and cannot be downloaded ({problem})"
            if data.fallback == "none" or not fallback:
                raise UserError(f"{notice}; set data.root to a folder with MNIST/raw, or data.name=digits")
            notice += ": training on the built-in digits set instead"
            return dataclasses.replace(prepare_digits(Path(data.cache)), notice=notice)
    check_raw(raw)
    return cached(Path(data.cache), "mnist", raw_state(raw), saved(lambda: sources.isolated(sources.read_mnist, root)))


def prepare_digits(cache: Path) -> Prepared:
    def make() -> Arrays:
        return (
            *synthetic_digits.generate(60_000, DATA_SEED, "train"),
            *synthetic_digits.generate(10_000, DATA_SEED, "test"),
        )

    return cached(cache, "digits", f"seed {DATA_SEED} version {DIGITS_VERSION}", saved(make))


def prepare_generated(data: Data) -> Prepared:
    sizes = data.samples, data.image_size, data.classes
    state = f"seed {DATA_SEED} sizes {sizes}"
    made = cached(Path(data.cache), "generated", state, saved(lambda: sources.generated(*sizes, DATA_SEED)))
    return dataclasses.replace(made, notice="generated images: random pixels and labels, good for throughput only")


def prepare_cifar10(data: Data) -> Prepared:
    root = Path(data.root)
    remedy = f"set data.root to a folder with {CIFAR_FOLDER}, or data.name=generated"
    if not (root / CIFAR_FOLDER).exists():
        problem = obtain(root, CIFAR_FOLDER, CIFAR_MIRROR, sources.download_cifar10, data.download_timeout)
        if problem:
            raise UserError(f"CIFAR-10 is not under {root} and cannot be downloaded ({problem}); {remedy}")
    state = sources.tree_state(root / CIFAR_FOLDER)
    try:
        return cached(Path(data.cache), "cifar10", state, saved(lambda: sources.isolated(sources.read_cifar10, root)))
    except UserError as error:
        raise UserError(f"{error}; delete {root / CIFAR_FOLDER} to download it again, {remedy}") from None


def prepare_folder(data: Data) -> Prepared:
    root = Path(data.root)
    absent = [name for name in ("train", "val") if not (root / name).is_dir()]
    if absent:
        raise UserError(
            f"{root / absent[0]} is missing; set data.root to a folder with train/<class>/* and val/<class>/*, "
            "or data.name=generated"
        )
    state = f"{sources.tree_state(root / 'train')} {sources.tree_state(root / 'val')} {data.image_size}"
    state += f" version {FOLDER_VERSION}"
    state += " skip" if data.unreadable == "skip" else ""  # with another setting, what was left out is looked at again

    def write(beside: Path) -> str:
        how = (root, beside, data.image_size, data.unreadable, DATA_SEED)
        return str(sources.isolated(image_folder.write_folder, *how, limit=24 * 3600))

    made = cached(Path(data.cache), "imagefolder", state, write)
    listed = made.path / image_folder.LEFT_OUT
    more = f"; all of them: {sources.shown(str(listed))}" if listed.exists() else ""
    return dataclasses.replace(made, notice=made.notice + more)


def check_raw(raw: Path) -> None:
    """Raise UserError unless all four raw files are there in full."""
    for name, size in RAW.items():
        file = raw / name
        remedy = f"delete {raw} to download it again, or set data.root to a complete copy"
        if not file.exists():
            raise UserError(f"{file} is missing; {remedy}")
        if file.stat().st_size != size:
            raise UserError(f"{file} is damaged: {file.stat().st_size} bytes, expected {size}; {remedy}")
        with open(file, "rb") as opened:
            if opened.read(4) != MAGIC[name.split("-")[1]]:
                raise UserError(f"{file} is damaged: it does not begin like a file of MNIST; {remedy}")


def raw_state(raw: Path) -> str:
    """Changes whenever a raw file is replaced."""
    stats = [(raw / name).stat() for name in RAW]
    return " ".join([str(raw.resolve())] + [f"{s.st_size}:{s.st_mtime_ns}" for s in stats])


def saved(make: Callable[[], Arrays]) -> Callable[[Path], str]:
    """Writes what `make` gives into a folder, as `cached` wants it."""

    def write(folder: Path) -> str:
        for part, array in zip(PARTS, make(), strict=True):
            with disk_errors(folder.parent):
                np.save(folder / f"{part}.npy", array)
        return ""

    return write


def cached(cache: Path, name: str, state: str, write: Callable[[Path], str]) -> Prepared:
    """The prepared set for a state of its source, made under a lock if it is not there.

    `write` puts an array for each of PARTS into a folder, and returns words that every run with this set will say.
    """
    path = cache / f"{name}-{hashlib.sha256(os.fsencode(state)).hexdigest()[:12]}"
    found = read_prepared(name, path)
    if found:
        return found
    with locked(cache):
        found = read_prepared(name, path)
        if found:
            return found
        write_prepared(path, write)
    done = read_prepared(name, path)
    assert done is not None
    return done


def read_prepared(name: str, path: Path) -> Prepared | None:
    """A complete prepared set, or None."""
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
    """Write all arrays beside, then rename: a crash leaves no half set. The caller holds the cache's lock."""
    host = socket.gethostname()  # on some network disks a lock holds on one host only
    for left in path.parent.glob(f".{path.name.rpartition('-')[0]}-*-{host}-*"):
        shutil.rmtree(left, ignore_errors=True)  # of a run that was killed: who holds the lock is alone here
    with disk_errors(path):
        beside = Path(tempfile.mkdtemp(prefix=f".{path.name}-{host}-", dir=path.parent))
    try:
        notice = write(beside)
        with disk_errors(path):
            files = {part: beside / f"{part}.npy" for part in PARTS}
            manifest = {
                "bytes": {part: file.stat().st_size for part, file in files.items()},
                "sha256": {part: file_hash(file) for part, file in files.items()},
                "notice": notice,
            }
            (beside / "manifest.json").write_text(json.dumps(manifest, indent=2))
            beside.chmod(0o755)
            shutil.rmtree(path, ignore_errors=True)
            beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextlib.contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Hold the cache's lock: runs that start together prepare once."""
    with disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        handle = os.open(cache / ".lock", os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(handle):
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def obtain(root: Path, folder: str, mirror: str, download: Callable[[Path, float], None], timeout: float) -> str:
    """Download a set into its `folder` in `root`; returns what went wrong, empty on success."""
    if timeout == 0:
        return "data.download_timeout=0"
    silent = network.silence(mirror, timeout)
    if silent:
        return f"no connection: {silent}"
    print(f"downloading {folder} into {root}", flush=True)
    try:
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        with locked(root):
            if any((root / folder).glob("**/*.*")) or any((root / folder).glob("**/*-ubyte")):
                return ""  # another process was faster
            with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as beside:
                # the time-out is for one silent connection; a slow but steady download may take longer
                sources.isolated(download, Path(beside), timeout, limit=60 * timeout)
                shutil.copytree(Path(beside) / folder, root / folder, dirs_exist_ok=True)
    except (UserError, OSError, shutil.Error) as error:
        return str(error)
    return ""
