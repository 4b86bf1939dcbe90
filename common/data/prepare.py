"""Preparation of a data set as uint8 arrays, which all ranks later map into memory.

A data set is prepared once, before any rank starts. torchvision is imported only to read or download raw files, and
only in a subprocess. Therefore, a prepared data set can be used without importing torchvision, and a download that
hangs can be killed.
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

from common.config.lookup import import_object
from common.data import sources
from common.data.sources import Arrays
from common.runs.folder import convert_disk_errors, read_json
from common.runs.progress import ProgressDisplay
from common.system.causes import Cause
from common.system.disk_problems import DISK_PROBLEMS
from common.system.errors import UserError
from configs import networks
from configs.shared import Data, Experiment, Log, TrainingExperiment

MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/train-labels-idx1-ubyte.gz"
CIFAR_MIRROR = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR_FOLDER = "cifar-10-batches-py"
LOOKUPS = {"text": "common.data.text:prepare_text"}
"""Import paths of the functions that prepare data sets which only some runs use."""
CUSTOM_LOOKUP = "common.data.own_data:prepare_custom_dataset"
PARTS = ("train_images", "train_labels", "test_images", "test_labels")
DATA_SEED = 0  # seed of all generated data sets; independent of the setting `seed`
# Increase a version number whenever a code change alters the arrays that the same settings and files produce.
DIGITS_VERSION = 1
FOLDER_VERSION = 3
READ_TIMEOUT = 24 * 3600.0  # maximum time in seconds for reading an image folder or a custom data set


@dataclasses.dataclass(frozen=True)
class PreparedDataset:
    """A prepared data set on disk.

    `sha256` contains the checksum of each array. `notice` is a message that is shown in every run with this data set.
    """

    name: str
    path: Path
    sha256: dict[str, str]
    notice: str = ""

    def map_array(self, part: str) -> np.ndarray:
        """Map one of the arrays listed in PARTS into memory (see sources.py for the shapes).

        The ranks on a host share the memory pages. A rank that changes the array gets private copies of the changed
        pages.
        """
        return np.load(self.path / f"{part}.npy", mmap_mode="c")

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes in the order of their labels; None if the data set has no class names."""
        try:
            names = json.loads((self.path / sources.CLASSES_FILE).read_text())
            return [str(name) for name in names]
        except (OSError, ValueError, TypeError):
            return None

    @property
    def statistics(self) -> tuple[Any, Any] | None:
        """Mean and standard deviation of the training pixels; None if the data set does not store them.

        The mean and the standard deviation are single numbers, or lists with one number per color channel.
        """
        statistics = read_json(self.path / sources.STATISTICS_FILE)
        if statistics.keys() >= {"mean", "std"}:
            return statistics["mean"], statistics["std"]
        return None

    @functools.cached_property
    def description(self) -> dict[str, Any] | None:
        """Description of map-style data sets (see map_style.py); None for a data set that is stored as arrays."""
        if sources.DESCRIPTION not in self.sha256:
            return None
        content: dict[str, Any] = json.loads(self.map_array(sources.DESCRIPTION).tobytes())
        return content

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.description["shape"]) if self.description else self.map_array("train_images").shape[1:]

    @property
    def target_kind(self) -> str:
        """Kind of the targets: `labels` (one integer per sample), `integers`, `floats`, or `tokens` (of text)."""
        if self.name == "text":
            return "tokens"
        if self.description:
            return str(self.description["target_kind"])
        targets = self.map_array("train_labels")
        if targets.dtype.kind == "f":
            return "floats"
        return "labels" if targets.ndim == 1 else "integers"

    @property
    def has_pixels(self) -> bool:
        """True if the inputs are uint8 values, which are normalized. Other inputs are used as they are."""
        if self.name == "text":
            return False
        is_custom = ":" in self.name
        return not is_custom or (self.description is None and self.map_array("train_images").dtype == np.uint8)

    @property
    def vocabulary(self) -> int | None:
        """Number of different tokens of a text; None for other data sets."""
        return read_json(self.path / sources.TEXT_FILE).get("vocabulary")

    def copy_user_files(self, code: Path) -> None:
        """Copy the user's file of a custom data set, or the tokenizer, into the source folder `code` of a run.

        Raises UserError if a file cannot be written to the disk.
        """
        copies = {sources.SOURCE_FILE: sources.RUN_SOURCE_FILE, sources.TOKENIZER_FILE: sources.RUN_TOKENIZER_FILE}
        for name, target in copies.items():
            if (self.path / name).is_file():
                with convert_disk_errors(code):
                    (code / target).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(self.path / name, code / target)

    def verify_checksums(self) -> None:
        """Raise UserError if an array has changed since it was prepared."""
        for part, expected in self.sha256.items():
            file = self.path / f"{part}.npy"
            if hash_file(file) != expected:
                problem = f"{file} is damaged (checksum differs); delete {self.path} and start the run again"
                raise UserError(problem, cause=Cause.DAMAGED_DATA)

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of meta.json that describe this data set."""
        return {"name": self.name, "path": str(self.path), "sha256": self.sha256}


NO_DATA = PreparedDataset("none", Path(os.devnull), {})
"""Placeholder for the data set of a run that does not train a model."""


def prepare_dataset(
    data: Data, fallback: bool = True, log: Log | None = None, code: Path | None = None
) -> PreparedDataset:
    """Find or prepare the data set that the settings `data` describe.

    If MNIST is missing and cannot be downloaded, the built-in digits are used instead, provided that both `fallback`
    and the settings allow it. The progress of a long preparation is displayed according to `log`, or hidden if `log` is
    None. If a run is resumed, `code` is the run's source folder, from which the user's file of a custom data set is
    read.

    Raises UserError, with a remedy, if files are missing or damaged, or if the data set cannot be written to the disk.
    """
    match data.name:
        case "digits":
            return prepare_digits(Path(data.cache))
        case "generated" | "vectors":
            return prepare_generated_dataset(data)
        case "cifar10":
            return prepare_cifar10(data)
        case "imagefolder":
            return prepare_image_folder(data, log or Log(progress="none"))
    if data.name in LOOKUPS or ":" in data.name:
        prepare_by_lookup = import_object(LOOKUPS.get(data.name, CUSTOM_LOOKUP))
        prepared: PreparedDataset = prepare_by_lookup(data, code)
        return prepared
    return prepare_mnist(data, fallback)


def prepare_dataset_of_config(cfg: Experiment, fallback: bool, code: Path | None = None) -> PreparedDataset:
    """Find or prepare the data set of a config; see `prepare_dataset`. A pure measurement has no data set.

    Raises UserError also if the model does not accept the samples.
    """
    if not isinstance(cfg, TrainingExperiment):
        return NO_DATA
    prepared = prepare_dataset(cfg.data, fallback, log=cfg.log, code=code)
    try:
        networks.check_shape(getattr(cfg, "model", ""), cfg.data.name, prepared.sample_shape)
        if prepared.vocabulary is not None:
            cfg.check_vocabulary(prepared.vocabulary)
    except ValueError as error:
        raise UserError(str(error)) from None
    if ":" in f"{getattr(cfg, 'model', '')} {cfg.loss} {cfg.data.name}" or cfg.loss != "cross_entropy":
        import_object(networks.TRAINING_CHECKER)(cfg, prepared, code)
    return prepared


def list_replaced_settings(cfg: Experiment, prepared: PreparedDataset) -> dict[str, str]:
    """Return the settings, by dotted name, that a fallback to another data set has replaced."""
    if not isinstance(cfg, TrainingExperiment) or prepared.name == cfg.data.name:
        return {}
    return {"data.name": prepared.name}


def prepare_mnist(data: Data, fallback: bool) -> PreparedDataset:
    """Find or prepare MNIST, and download it if it is missing. Raises UserError if MNIST is not available.

    The built-in digits replace a missing MNIST only if data.root has its default value. If the user has changed
    data.root, a missing MNIST is most likely due to a wrong path.
    """
    root = Path(data.root)
    cache = Path(data.cache)
    is_default_root = data.root in (Data.root, os.environ.get("DATA_ROOT"))
    if not is_default_root and not os.path.isdir(root):
        remedy = "use a folder with MNIST/raw, create this folder to download MNIST into it, or set data.name=digits"
        raise UserError(f"data.root={root}: the folder does not exist; {remedy}")
    raw = root / "MNIST" / "raw"
    if not any(os.path.exists(raw / name) for name in sources.MNIST_FILES):
        problem = sources.try_download("MNIST", root, "MNIST", MNIST_MIRROR, data.download_timeout)
        if problem:
            notice = f"MNIST is not in the folder {root} and cannot be downloaded ({problem})"
            if not is_default_root or data.fallback == "none" or not fallback:
                raise UserError(f"{notice}; set data.root to a folder that contains MNIST/raw, or set data.name=digits")
            notice += ": training on the built-in digits set instead"
            return dataclasses.replace(prepare_digits(cache), notice=notice)
    sources.check_mnist(raw)
    state = sources.fingerprint_mnist(raw)
    return find_or_store_arrays(cache, "mnist", state, lambda: sources.call_in_subprocess(sources.read_mnist, root))


def prepare_digits(cache: Path) -> PreparedDataset:
    """Find or generate the built-in digits: 60,000 training samples and 10,000 test samples, as in MNIST."""

    def generate_arrays() -> Arrays:
        from common.data import synthetic_digits  # imported here because the digits are generated once per machine

        train = synthetic_digits.generate_digits(60_000, DATA_SEED, "train")
        test = synthetic_digits.generate_digits(10_000, DATA_SEED, "test")
        return *train, *test

    return find_or_store_arrays(cache, "digits", f"seed {DATA_SEED} version {DIGITS_VERSION}", generate_arrays)


def prepare_generated_dataset(data: Data) -> PreparedDataset:
    """Find or generate a training set of `data.samples` random images or vectors, and a smaller test set."""
    cache = Path(data.cache)
    if data.name == "vectors":
        state = f"seed {DATA_SEED} samples {data.samples}"
        return find_or_store_arrays(cache, "vectors", state, lambda: sources.generate_vectors(data.samples, DATA_SEED))
    sizes = (data.samples, data.image_size, data.classes)
    state = f"seed {DATA_SEED} sizes {sizes}"
    prepared = find_or_store_arrays(cache, "generated", state, lambda: sources.generate_images(*sizes, DATA_SEED))
    notice = "generated images: pixels and labels are random; use this data set only to measure throughput"
    return dataclasses.replace(prepared, notice=notice)


def prepare_cifar10(data: Data) -> PreparedDataset:
    """Find or prepare CIFAR-10, and download it if it is missing. Raises UserError if CIFAR-10 is not available."""
    root = Path(data.root)
    remedy = f"set data.root to a folder that contains {CIFAR_FOLDER}, or set data.name=generated"
    if not os.path.exists(root / CIFAR_FOLDER):
        problem = sources.try_download("CIFAR10", root, CIFAR_FOLDER, CIFAR_MIRROR, data.download_timeout)
        if problem:
            raise UserError(f"CIFAR-10 is not in the folder {root} and cannot be downloaded ({problem}); {remedy}")
    state = sources.fingerprint_folder(root / CIFAR_FOLDER)
    try:
        return find_or_store_arrays(
            Path(data.cache), "cifar10", state, lambda: sources.call_in_subprocess(sources.read_cifar10, root)
        )
    except UserError as error:
        if error.cause in DISK_PROBLEMS:  # the arrays cannot be written
            raise
        problem = f"{error}; delete {root / CIFAR_FOLDER} to download it again, {remedy}"
        raise UserError(problem, cause=error.cause) from None


def prepare_image_folder(data: Data, log: Log) -> PreparedDataset:
    """Find or prepare the arrays of an image folder (see image_folder.py).

    Raises UserError if the folder is missing or cannot be converted.
    """
    from common.data import image_folder  # imported here because other data sets do not need it

    root = Path(data.root)
    train = root / "train"
    val = root / "val"
    for folder in (train, val):
        if not os.path.isdir(folder):
            remedy = "set data.root to a folder with train/<class>/* and val/<class>/*, or set data.name=generated"
            raise UserError(f"{folder} is missing; {remedy}")
    state = f"{sources.fingerprint_folder(train)} {sources.fingerprint_folder(val)} {data.image_size}"
    state += f" version {FOLDER_VERSION}"
    if data.unreadable == "skip":  # part of the state, so that a change of this setting reads the files again
        state += " skip"

    def write_arrays(folder: Path) -> str:
        with contextlib.closing(ProgressDisplay(log, silent=False)) as screen:
            show = functools.partial(screen.show_progress, "preparation")
            show(0, 0)  # displayed until the files have been counted
            function = image_folder.write_folder_as_arrays
            settings = (root, folder, data.image_size, data.unreadable, DATA_SEED)
            return str(sources.call_in_subprocess(function, *settings, limit=READ_TIMEOUT, show=show))

    prepared = find_or_prepare_dataset(Path(data.cache), "imagefolder", state, write_arrays)
    skipped = prepared.path / sources.SKIPPED_FILE
    if not skipped.exists():
        return prepared
    notice = f"{prepared.notice}; full list: {sources.make_printable(str(skipped))}"
    return dataclasses.replace(prepared, notice=notice)


def find_or_store_arrays(cache: Path, name: str, state: str, make_arrays: Callable[[], Arrays]) -> PreparedDataset:
    """Return a prepared data set, whose arrays are made by `make_arrays` if they are not cached yet.

    `state` is a string that identifies the content of the source. Raises UserError if the arrays cannot be written to
    the disk.
    """

    def write_arrays(folder: Path) -> str:
        for part, array in zip(PARTS, make_arrays(), strict=True):
            with convert_disk_errors(folder.parent):
                np.save(folder / f"{part}.npy", array)
        return ""

    return find_or_prepare_dataset(cache, name, state, write_arrays)


def find_or_prepare_dataset(cache: Path, name: str, state: str, write: Callable[[Path], str]) -> PreparedDataset:
    """Return a prepared data set, which is prepared under a lock if it is not cached yet.

    `state` is a string that identifies the content of the source. `write` saves one array for each name in PARTS to a
    folder, and returns a notice that every run with this data set displays.
    """
    path = cache / f"{name}-{hashlib.sha256(os.fsencode(state)).hexdigest()[:12]}"
    if read_prepared_dataset(name, path) is None:
        with sources.hold_folder_lock(cache):
            if read_prepared_dataset(name, path) is None:  # another run may have prepared it in the meantime
                write_prepared_dataset(path, write)
    prepared = read_prepared_dataset(name, path)
    assert prepared is not None
    return prepared


def read_prepared_dataset(name: str, path: Path) -> PreparedDataset | None:
    """Return the prepared data set in a folder, or None if the data set is missing or incomplete."""
    manifest = read_json(path / "manifest.json")
    sizes = manifest.get("bytes")
    hashes = manifest.get("sha256")
    if not isinstance(sizes, dict) or not isinstance(hashes, dict):
        return None
    if set(sizes) != set(hashes) or set(sizes) not in ({*PARTS}, {sources.DESCRIPTION}):
        return None
    for part, size in sizes.items():
        file = path / f"{part}.npy"
        if not file.exists() or file.stat().st_size != size:
            return None
    return PreparedDataset(name, path.resolve(), hashes, str(manifest.get("notice", "")))


def write_prepared_dataset(path: Path, write: Callable[[Path], str]) -> None:
    """Write all arrays to a temporary folder, then rename the folder to `path` atomically.

    The caller must hold the lock of the cache folder.
    """
    host = socket.gethostname()  # part of the folder name, because on some network disks locks work on one host only
    name = path.name
    for leftover in path.parent.glob(f".{name.rpartition('-')[0]}-*-{host}-*"):  # left behind by killed runs
        shutil.rmtree(leftover, ignore_errors=True)
    with convert_disk_errors(path):
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-{host}-", dir=path.parent))
    folder = path.parent / temporary.name  # relative like `path`; mkdtemp returns an absolute path since 3.12
    try:
        notice = write(folder)
        with convert_disk_errors(path):
            is_described = (folder / f"{sources.DESCRIPTION}.npy").exists()
            files = {part: folder / f"{part}.npy" for part in ([sources.DESCRIPTION] if is_described else PARTS)}
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
    """Return the SHA-256 checksum of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
