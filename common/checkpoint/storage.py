"""Checkpoint folders on disk: their names, manifests, publication and deletion. This module does not import torch.

attempts/0002/checkpoints/
  step-00000400/        complete checkpoint; renamed to this name after all its files were flushed to the disk
    rank-0.pt ...       one file per rank
    manifest.json       format, step, attempt, number of ranks, facts; size and SHA-256 of each file; its own SHA-256
  .step-00000500.new/   staging folder, which is in use or was left behind by a killed rank; never loaded
  latest, best          names of checkpoints, for users; `latest` also shows that a deleted checkpoint existed
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.runs.claims import raise_if_superseded
from common.runs.folder import RunFolder, fsync_path

FORMAT = 1
MANIFEST = "manifest.json"
STEP_NAME = re.compile("step-[0-9]{8,15}")
MAX_MANIFEST_BYTES = 1 << 24


class InvalidCheckpoint(Exception):
    """Exception raised when a checkpoint cannot be used. The message states the reason."""


class UnreadableCheckpoint(InvalidCheckpoint):
    """Exception raised when the current user has no permission to read a checkpoint, or does not own it."""


@dataclass(frozen=True)
class ManifestEntry:
    """Size in bytes and SHA-256 checksum of a file in a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of the file manifest.json."""

    step: int
    attempt: int
    processes: int
    files: dict[str, ManifestEntry]
    """Size and checksum of each rank's file, by file name, in the order of the ranks."""
    facts: dict[str, Any]
    """Common values of the state, such as the epoch and the W&B id, which can be read without importing torch."""

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Manifest:
        """Create a manifest from its JSON object.

        Raises ValueError, TypeError, KeyError or OverflowError if the JSON object is malformed.
        """
        files = {}
        for name, entry in content["files"].items():
            files[name] = ManifestEntry(int(entry["bytes"]), str(entry["sha256"]))
        return cls(
            step=int(content["step"]),
            attempt=int(content["attempt"]),
            processes=int(content["processes"]),
            files=files,
            facts=dict(content["facts"]),
        )

    def to_json(self) -> str:
        """Return the manifest as JSON text, including its own checksum."""
        content = {"format": FORMAT} | asdict(self)
        return json.dumps(content | {"sha256": hash_manifest(content)}, indent=1) + "\n"


@dataclass(frozen=True)
class CheckpointPath:
    """Path of a checkpoint. The checkpoint need not exist."""

    attempt: RunFolder
    step: int

    @property
    def path(self) -> Path:
        return get_checkpoints_dir(self.attempt) / self.name

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}"

    def __str__(self) -> str:
        return f"{self.name} of attempt {self.attempt.number}"


def get_checkpoints_dir(attempt: RunFolder) -> Path:
    """Return the folder that contains the checkpoints of an attempt."""
    return attempt.attempt_folder / "checkpoints"


def make_rank_file_name(rank: int) -> str:
    """Return the file name of a rank's part of a checkpoint."""
    return f"rank-{rank}.pt"


def hash_manifest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 checksum of a manifest.

    `content` contains all entries except the checksum. The checksum does not depend on whitespace.
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- listing


def list_checkpoints(attempt: RunFolder) -> list[CheckpointPath]:
    """Return the checkpoints of an attempt, oldest first. The contents of the checkpoints are not checked."""
    checkpoints = []
    for path in get_checkpoints_dir(attempt).glob("step-*"):
        if not STEP_NAME.fullmatch(path.name):
            continue
        checkpoint = CheckpointPath(attempt, int(path.name[5:]))
        if checkpoint.name == path.name:  # ignore names with additional leading zeros
            checkpoints.append(checkpoint)
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def list_resumable_checkpoints(folder: RunFolder) -> list[CheckpointPath]:
    """Return all checkpoints from which a new attempt may resume, newest first."""
    resumable: list[CheckpointPath] = []
    for attempt, last_step in folder.trace_attempts():
        for checkpoint in reversed(list_checkpoints(attempt)):
            if last_step is None or checkpoint.step <= last_step:
                resumable.append(checkpoint)
    return resumable


def list_lost_checkpoints(folder: RunFolder) -> list[CheckpointPath]:
    """Return a list with the newest checkpoint of the run if its folder is missing, otherwise an empty list.

    Older checkpoints are not considered, because they may have been deleted after newer checkpoints were saved (see
    `checkpoint.keep`).
    """
    for attempt, _ in folder.trace_attempts():
        name = read_pointer_file(attempt, "latest") or ""
        if STEP_NAME.fullmatch(name):
            newest = CheckpointPath(attempt, int(name[5:]))
            return [] if newest.path.exists() else [newest]
    return []


def list_staging_dirs(folder: RunFolder) -> list[Path]:
    """Return the staging folders that killed ranks have left behind."""
    paths: list[Path] = []
    for attempt, _ in folder.trace_attempts():
        paths += sorted(get_checkpoints_dir(attempt).glob(".step-*.new"))
    return paths


# ---- reading


@contextlib.contextmanager
def open_owned_path(path: str | Path, flags: int, label: str, parent_fd: int | None = None) -> Iterator[int]:
    """Open a file or folder and yield its file descriptor.

    Raises UnreadableCheckpoint if its owner is neither this user nor root, and InvalidCheckpoint if the path is a
    symbolic link.
    """
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, dir_fd=parent_fd)
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{label} is missing") from None
    except PermissionError as error:
        raise UnreadableCheckpoint(f"{label}: {error.strerror}") from None
    except OSError as error:
        is_link = error.errno == errno.ELOOP or (parent_fd is None and Path(path).is_symlink())
        raise InvalidCheckpoint(f"{label} is a symbolic link" if is_link else f"{label}: {error.strerror}") from None
    try:
        owner = os.fstat(fd).st_uid
        if owner not in (os.geteuid(), 0):
            raise UnreadableCheckpoint(f"{label} belongs to user ID {owner}; the current user ID is {os.geteuid()}")
        yield fd
    finally:
        os.close(fd)


def read_owned_file(checkpoint: CheckpointPath, name: str, size: int | None = None) -> bytes:
    """Return the content of a file in a checkpoint. Raises InvalidCheckpoint if the file cannot be used.

    The file is read only once, so that the bytes that are checked are also the bytes that are loaded. The file must
    contain exactly `size` bytes, or at most MAX_MANIFEST_BYTES if `size` is None.
    """
    with (
        open_owned_path(checkpoint.path, os.O_DIRECTORY, "the checkpoint folder") as folder_fd,
        open_owned_path(name, 0, name, folder_fd) as fd,
    ):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidCheckpoint(f"{name} is not a regular file")
        if size is not None and status.st_size != size:
            raise InvalidCheckpoint(f"{name} has {status.st_size} bytes instead of {size}")
        if size is None and status.st_size > MAX_MANIFEST_BYTES:
            raise InvalidCheckpoint(f"{name} has {status.st_size} bytes; the maximum is {MAX_MANIFEST_BYTES}")
        try:
            with open(fd, "rb", closefd=False) as file:
                return file.read(status.st_size)
        except OSError as error:
            raise InvalidCheckpoint(f"{name}: {error.strerror}") from None


def read_verified_rank_file(checkpoint: CheckpointPath, manifest: Manifest, rank: int) -> bytes:
    """Return the content of a rank's file. Raises InvalidCheckpoint if the file does not match the manifest."""
    name = make_rank_file_name(rank)
    entry = manifest.files[name]
    content = read_owned_file(checkpoint, name, entry.bytes)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise InvalidCheckpoint(f"{name} does not match its checksum")
    return content


def read_manifest(checkpoint: CheckpointPath) -> Manifest:
    """Read the manifest of a checkpoint. Raises InvalidCheckpoint if the manifest is missing or invalid."""
    raw = read_owned_file(checkpoint, MANIFEST)
    try:
        content = json.loads(raw)
        if content["format"] != FORMAT:
            file_format = str(content["format"])[:20]
            raise InvalidCheckpoint(f"{MANIFEST} has format {file_format}, but this version reads format {FORMAT}")
        if content.pop("sha256") != hash_manifest(content):
            raise InvalidCheckpoint(f"{MANIFEST} does not match its checksum")
        manifest = Manifest.from_content(content)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise InvalidCheckpoint(f"{MANIFEST} cannot be read") from None
    expected_names = [make_rank_file_name(rank) for rank in range(len(manifest.files))]
    if len(manifest.files) != manifest.processes or list(manifest.files) != expected_names:
        raise InvalidCheckpoint(f"{MANIFEST} does not list exactly one file for each of {manifest.processes} ranks")
    if (manifest.step, manifest.attempt) != (checkpoint.step, checkpoint.attempt.number):
        raise InvalidCheckpoint(f"{MANIFEST} belongs to step {manifest.step} of attempt {manifest.attempt}")
    return manifest


# ---- writing


class StagingDir:
    """Folder in which a checkpoint is written before it is published.

    Only rank 0 calls the methods. The methods `create` and `publish` raise OSError if the disk reports an error.
    """

    def __init__(self, attempt: RunFolder, step: int) -> None:
        self.target = CheckpointPath(attempt, step)
        self.parent = get_checkpoints_dir(attempt)
        self.path = self.parent / f".{self.target.name}.new"

    def create(self) -> None:
        """Create the staging folder, and delete hidden checkpoint folders that remain from earlier failures."""
        if not self.parent.exists():
            self.parent.mkdir()
            fsync_path(self.parent.parent)
        for leftover in self.parent.glob(".step-*"):
            shutil.rmtree(leftover)
        self.path.mkdir()

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, and publish the checkpoint with a single rename.

        Call this method after all ranks have written their files. Raises RunTakenError if a newer attempt has started.
        """
        for name, entry in manifest.files.items():
            if (self.path / name).stat().st_size != entry.bytes:
                raise OSError(errno.EIO, f"the size of {name} on this host differs from the number of bytes written")
        with open(self.path / MANIFEST, "x") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        fsync_path(self.path)
        raise_if_superseded(self.target.attempt)
        if self.target.path.exists():  # an earlier call failed after the rename
            shutil.rmtree(rename_for_deletion(self.target))
        self.path.rename(self.target.path)
        fsync_path(self.parent)

    def discard(self) -> None:
        """Delete the staging folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def rename_for_deletion(checkpoint: CheckpointPath) -> Path:
    """Rename a checkpoint that will be deleted, so that a partially deleted checkpoint is never loaded.

    Returns the new path. Raises OSError if the rename fails.
    """
    return checkpoint.path.rename(checkpoint.path.with_name(f".{checkpoint.name}.old"))


def retire_old_checkpoints(attempt: RunFolder, keep: int, best: int | None) -> list[Path]:
    """Rename checkpoints that are no longer needed, and return the folders that can be deleted.

    The following checkpoints are kept: the newest `keep` complete checkpoints of the run, but at least 2; incomplete
    checkpoints that are newer than any of these; and the checkpoint of step `best`. Until this attempt has a best
    checkpoint, the best checkpoint of an earlier attempt is kept instead. If a newer attempt exists, all checkpoints
    are kept, because the newer attempt may have resumed from any of them. Raises OSError if a rename fails.
    """
    if attempt.is_superseded or attempt.parent_record is None:  # an attempt without parent record is never resumed
        return []
    attempts = [other for other in attempt.list_attempts() if other.number <= attempt.number]
    folders: list[Path] = []
    for earlier in attempts[:-1]:
        folders += get_checkpoints_dir(earlier).glob(".step-*")  # left behind by killed ranks

    # Find the checkpoints to keep.
    candidates = list_resumable_checkpoints(attempt)
    best_checkpoints = [
        checkpoint for checkpoint in candidates if read_pointer_file(checkpoint.attempt, "best") == checkpoint.name
    ]
    kept_paths = {checkpoint.path for checkpoint in best_checkpoints[:1]}
    if best is not None:
        kept_paths = {CheckpointPath(attempt, best).path}
    complete = 0  # number of complete checkpoints among the newest ones
    for candidate in candidates:
        if complete < max(2, keep):
            kept_paths.add(candidate.path)
            complete += is_complete_checkpoint(candidate)
    if complete < max(2, keep):  # all checkpoints are still needed
        return folders

    # Rename all other checkpoints.
    for other in attempts:
        for checkpoint in list_checkpoints(other):
            if checkpoint.path not in kept_paths:
                folders.append(rename_for_deletion(checkpoint))
    return folders


def is_complete_checkpoint(checkpoint: CheckpointPath) -> bool:
    """Return True if all files of a checkpoint exist and have the sizes listed in the manifest.

    The contents of the ranks' files are not read.
    """
    try:
        for name, entry in read_manifest(checkpoint).files.items():
            if (checkpoint.path / name).stat().st_size != entry.bytes:
                return False
    except (InvalidCheckpoint, OSError):
        return False
    return True


def read_pointer_file(attempt: RunFolder, pointer: str) -> str | None:
    """Return the checkpoint name stored in the file `latest` or `best`; None if the file cannot be read."""
    try:
        return (get_checkpoints_dir(attempt) / pointer).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def delete_folders(paths: list[Path]) -> None:
    """Delete folders, and ignore disk errors."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
