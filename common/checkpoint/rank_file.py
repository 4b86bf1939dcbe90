"""Reading and writing of the ranks' files in a checkpoint.

A checksum is computed while the file is written. Code in a checkpoint file is never executed.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from common.checkpoint import storage
from common.checkpoint.hashing_writer import HashingWriter
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint, Manifest, ManifestEntry
from common.system import foreign_text
from common.system.bounded_wait import mark_bounded_wait
from common.system.causes import Cause
from common.system.errors import UserError, summarize_error

PARTS = ("model", "optimizer", "common", "local")


class WriteProblem(NamedTuple):
    """Why a checkpoint could not be written."""

    text: str
    cause: Cause

    @classmethod
    def from_error(cls, error: OSError | UserError) -> WriteProblem:
        """Describe a disk error, without a remedy. A UserError is described by the disk error that caused it."""
        disk_error = error.__cause__ or error if isinstance(error, UserError) else error
        return cls(summarize_error(disk_error), foreign_text.classify_error(error))


@mark_bounded_wait()
def write_rank_file(path: Path, content: dict[str, Any]) -> ManifestEntry:
    """Write a rank's file, flush the file to the disk, and return its size and checksum.

    Raises OSError if the file cannot be written.
    """
    with open(path, "xb", buffering=0) as file:
        with HashingWriter(file) as writer:
            torch.save(content, cast(IO[bytes], writer))
        if writer.error is not None:
            raise writer.error
        os.fsync(file.fileno())
    return ManifestEntry(writer.size, writer.digest.hexdigest())


def read_rank_file(checkpoint: CheckpointPath, manifest: Manifest, rank: int) -> dict[str, Any]:
    """Return the tensors and primitives in a rank's file.

    Raises InvalidCheckpoint if the file does not match the manifest or cannot be read.
    """
    name = storage.make_rank_file_name(rank)
    content = storage.read_verified_rank_file(checkpoint, manifest, rank)
    try:
        part = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:  # torch's message suggests an option that can execute code
        raise InvalidCheckpoint(f"{name} is damaged, or contains data other than tensors, numbers and text") from None
    except Exception as error:  # noqa: BLE001 (torch raises many types of exceptions for unreadable files)
        raise InvalidCheckpoint(f"{name} cannot be read: {summarize_error(error)}") from None
    if not isinstance(part, dict) or any(not isinstance(part.get(key), dict) for key in PARTS):
        raise InvalidCheckpoint(f"{name} does not contain the state of a rank")
    return part


def read_full_model(checkpoint: CheckpointPath) -> dict[str, Tensor]:
    """Return all parameters and buffers in a checkpoint, by name. Raises InvalidCheckpoint if a file is invalid."""
    return read_model_and_common_state(checkpoint)[0]


def read_model_and_common_state(checkpoint: CheckpointPath) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all parameters and buffers in a checkpoint, by name, and the state that all ranks share.

    The parts saved by different ranks, such as pipeline stages or servers, are merged. Raises InvalidCheckpoint if a
    file is invalid.
    """
    manifest = storage.read_manifest(checkpoint)
    model: dict[str, Tensor] = {}
    common: dict[str, Any] = {}
    for rank in range(manifest.processes):
        part = read_rank_file(checkpoint, manifest, rank)
        model |= part["model"]
        common |= part["common"]
    return model, common
