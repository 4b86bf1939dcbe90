"""Checkpoint folders on disk: names, manifest, publishing and deleting. Imports no torch.

attempts/0002/checkpoints/
  step-00000400/        complete: renamed to this name after all of it had reached the disk
    rank-0.pt ...       one file per rank
    manifest.json       format, step, attempt, processes, facts; size and SHA-256 of each file and of itself
  .step-00000500.new/   staging folder, or left by a rank that was killed; never read
  latest, best          names, for people; where no checkpoint is left, `latest` tells that there were some
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

from common.runs.claims import check_still_current
from common.runs.folder import Folder, fsync_path

FORMAT = 1
MANIFEST = "manifest.json"
STEP_NAME = re.compile("step-[0-9]{8,15}")
LONGEST = 1 << 24  # bytes of a manifest; a longer one is invalid


class InvalidCheckpoint(Exception):
    """Error of a checkpoint that cannot be used; its text is the reason."""


@dataclass(frozen=True)
class ManifestEntry:
    """Size and checksum of a file, as the manifest records them."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json."""

    step: int
    attempt: int
    processes: int
    files: dict[str, ManifestEntry]
    """The files of the ranks, in their order."""
    facts: dict[str, Any]
    """Common values of the state, such as epoch and W&B id, for a reader without torch."""

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Manifest:
        """Make a manifest from its values as JSON has them. Raises ValueError, TypeError, KeyError or OverflowError."""
        files = {name: ManifestEntry(int(e["bytes"]), str(e["sha256"])) for name, e in content["files"].items()}
        step, attempt, processes = (int(content[name]) for name in ("step", "attempt", "processes"))
        return cls(step, attempt, processes, files, dict(content["facts"]))

    def to_json(self) -> str:
        """Return the manifest as JSON, with its own checksum."""
        content = {"format": FORMAT} | asdict(self)
        return json.dumps(content | {"sha256": hash_manifest(content)}, indent=1) + "\n"


@dataclass(frozen=True)
class CheckpointPath:
    """Path of one checkpoint, which may exist or not."""

    attempt: Folder
    step: int

    @property
    def path(self) -> Path:
        return checkpoints_dir(self.attempt) / self.name

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}"

    def __str__(self) -> str:
        return f"{self.name} of attempt {self.attempt.number}"


def checkpoints_dir(attempt: Folder) -> Path:
    """Return the folder of an attempt's checkpoints."""
    return attempt.attempt / "checkpoints"


def make_rank_file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank}.pt"


def hash_manifest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own checksum, independent of spacing."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- finding


def list_checkpoints(attempt: Folder) -> list[CheckpointPath]:
    """Return the checkpoints of an attempt by name, oldest first; reading them shows whether they are valid."""
    names = [path.name for path in checkpoints_dir(attempt).glob("step-*")]
    steps = {int(name[5:]) for name in names if STEP_NAME.fullmatch(name)}
    found = [CheckpointPath(attempt, step) for step in sorted(steps)]
    return [checkpoint for checkpoint in found if checkpoint.name in names]


def list_resumable_checkpoints(folder: Folder) -> list[CheckpointPath]:
    """Return all checkpoints that a new attempt may resume, the best choice first."""
    found: list[CheckpointPath] = []
    for attempt, bound in folder.trace_attempts():
        found += [c for c in reversed(list_checkpoints(attempt)) if bound is None or c.step <= bound]
    return found


def list_lost_checkpoints(folder: Folder) -> list[CheckpointPath]:
    """Return the newest checkpoint of the run in a list, if its folder is missing.

    Older ones do not count: a newer checkpoint may have replaced them (checkpoint.keep).
    """
    for attempt, _ in folder.trace_attempts():
        name = read_pointer(attempt, "latest") or ""
        if STEP_NAME.fullmatch(name):
            newest = CheckpointPath(attempt, int(name[5:]))
            return [] if newest.path.exists() else [newest]
    return []


def list_staging_dirs(folder: Folder) -> list[Path]:
    """Return the staging folders that killed ranks left."""
    return [
        path for attempt, _ in folder.trace_attempts() for path in sorted(checkpoints_dir(attempt).glob(".step-*.new"))
    ]


# ---- reading


@contextlib.contextmanager
def open_owned(name: str | Path, flags: int, what: str, within: int | None = None) -> Iterator[int]:
    """Open a file or folder that belongs to this user or root and is no link. Raises InvalidCheckpoint."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=within)
    except FileNotFoundError:
        raise InvalidCheckpoint(f"{what} is missing") from None
    except OSError as error:
        linked = error.errno == errno.ELOOP or (within is None and Path(name).is_symlink())
        raise InvalidCheckpoint(f"{what} is a link" if linked else f"{what}: {error.strerror}") from None
    try:
        owner = os.fstat(handle).st_uid
        if owner not in (os.geteuid(), 0):
            raise InvalidCheckpoint(f"{what} belongs to user {owner}, not to you ({os.geteuid()})")
        yield handle
    finally:
        os.close(handle)


def read_owned_file(checkpoint: CheckpointPath, name: str, size: int | None = None) -> bytes:
    """Return the bytes of a checkpoint's file, read once: they are what is checked. Raises InvalidCheckpoint."""
    with (
        open_owned(checkpoint.path, os.O_DIRECTORY, "the folder") as folder,
        open_owned(name, 0, name, folder) as handle,
    ):
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidCheckpoint(f"{name} is no file")
        if size is not None and status.st_size != size:
            raise InvalidCheckpoint(f"{name} has {status.st_size} bytes instead of {size}")
        if size is None and status.st_size > LONGEST:
            raise InvalidCheckpoint(f"{name} has {status.st_size} bytes")
        try:
            with open(handle, "rb", closefd=False) as file:
                return file.read(status.st_size)
        except OSError as error:
            raise InvalidCheckpoint(f"{name}: {error.strerror}") from None


def read_verified_rank_file(checkpoint: CheckpointPath, manifest: Manifest, rank: int) -> bytes:
    """Return the bytes of a rank's file, compared with the manifest. Raises InvalidCheckpoint."""
    name = make_rank_file_name(rank)
    entry = manifest.files[name]
    content = read_owned_file(checkpoint, name, entry.bytes)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise InvalidCheckpoint(f"{name} has another checksum")
    return content


def read_manifest(checkpoint: CheckpointPath) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises InvalidCheckpoint."""
    raw = read_owned_file(checkpoint, MANIFEST)
    try:
        content = json.loads(raw)
        if content["format"] != FORMAT:
            found = str(content["format"])[:20]
            raise InvalidCheckpoint(f"it has format {found}, and this version of the code reads {FORMAT}")
        if content.pop("sha256") != hash_manifest(content):
            raise InvalidCheckpoint(f"{MANIFEST} has another checksum")
        manifest = Manifest.from_content(content)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise InvalidCheckpoint(f"{MANIFEST} cannot be read") from None
    names = list(manifest.files)
    if names != [make_rank_file_name(rank) for rank in range(len(names))] or len(names) != manifest.processes:
        raise InvalidCheckpoint(f"{MANIFEST} does not name one file for each of {manifest.processes} ranks")
    if (manifest.step, manifest.attempt) != (checkpoint.step, checkpoint.attempt.number):
        raise InvalidCheckpoint(f"it is that of step {manifest.step} of attempt {manifest.attempt}")
    return manifest


# ---- writing


class StagingDir:
    """Folder in which a checkpoint is written before it is published.

    One rank calls the methods, which raise OSError.
    """

    def __init__(self, attempt: Folder, step: int) -> None:
        self.target = CheckpointPath(attempt, step)
        self.parent = checkpoints_dir(attempt)
        self.path = self.parent / f".{self.target.name}.new"

    def create(self) -> None:
        """Make the folder, and delete staging folders and tombstones that earlier failures left."""
        if not self.parent.exists():
            self.parent.mkdir()
            fsync_path(self.parent.parent)
        for left in self.parent.glob(".step-*"):
            shutil.rmtree(left)
        self.path.mkdir()

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest once all files are on the disk, and publish the checkpoint by one rename.

        Raises RunTaken where a newer attempt has begun.
        """
        for name, entry in manifest.files.items():
            if (self.path / name).stat().st_size != entry.bytes:
                raise OSError(errno.EIO, f"{name} is shorter here than where it was written")
        with open(self.path / MANIFEST, "x") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        fsync_path(self.path)
        check_still_current(self.target.attempt)
        if self.target.path.exists():  # renamed before, but then the disk failed
            shutil.rmtree(rename_to_tombstone(self.target))
        self.path.rename(self.target.path)
        fsync_path(self.parent)

    def discard(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def rename_to_tombstone(checkpoint: CheckpointPath) -> Path:
    """Rename a checkpoint to a tombstone, which is never read: a half-deleted one cannot be loaded. Raises OSError."""
    return checkpoint.path.rename(checkpoint.path.with_name(f".{checkpoint.name}.old"))


def retire_old_checkpoints(attempt: Folder, keep: int, best: int | None) -> list[Path]:
    """Rename old checkpoints to tombstones; return the folders to delete. Raises OSError.

    The newest `keep` complete ones of the run stay, at least 2, and what is newer than these; so does that of step
    `best`, or the best one of an earlier attempt until this has a better. Once a newer attempt exists all stay: it may
    have resumed from any of these.
    """
    if attempt.is_superseded or attempt.parent_record is None:  # without a record nobody resumes this one
        return []
    attempts = [one for one in attempt.attempts() if one.number <= attempt.number]
    left = [path for one in attempts[:-1] for path in checkpoints_dir(one).glob(".step-*")]  # half-written
    candidates = list_resumable_checkpoints(attempt)
    spared = [candidate for candidate in candidates if read_pointer(candidate.attempt, "best") == candidate.name][:1]
    kept = {one.path for one in ([CheckpointPath(attempt, best)] if best is not None else spared)}
    complete = 0
    for candidate in candidates:
        if complete < max(2, keep):
            kept.add(candidate.path)
            complete += is_complete(candidate)
    if complete < max(2, keep):
        return left
    old = [checkpoint for one in attempts for checkpoint in list_checkpoints(one) if checkpoint.path not in kept]
    return [rename_to_tombstone(checkpoint) for checkpoint in old] + left


def is_complete(checkpoint: CheckpointPath) -> bool:
    """Check that all files are there and as long as the manifest says, without reading them."""
    try:
        files = read_manifest(checkpoint).files
        return all((checkpoint.path / name).stat().st_size == entry.bytes for name, entry in files.items())
    except (InvalidCheckpoint, OSError):
        return False


def read_pointer(attempt: Folder, pointer: str) -> str | None:
    """Return the name of the checkpoint that `latest` or `best` points to."""
    try:
        return (checkpoints_dir(attempt) / pointer).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def delete_folders(paths: list[Path]) -> None:
    """Delete folders, as far as the disk allows it."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
