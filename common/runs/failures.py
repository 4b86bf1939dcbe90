"""Failure records: why a rank failed, for the diagnosis of the run. This module does not import torch.

A rank that fails writes failure-RANK.json to the folder of its attempt. A rank that is killed by a signal writes no
record; its launcher or SLURM reports the signal.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass

from common.runs.folder import RunFolder, read_json, write_json
from common.system.causes import Cause
from common.system.errors import UserError


@dataclass(frozen=True)
class Failure:
    """Failure of one rank."""

    cause: Cause
    message: str
    """Error message in one line."""
    time: float
    """Time of the failure in seconds since 1970."""


def write_failure(attempt: RunFolder, rank: int, failure: Failure) -> None:
    """Record the failure of a rank. If the disk fails, the failure is not recorded."""
    with contextlib.suppress(UserError, OSError):
        write_json(attempt.attempt_folder / f"failure-{rank}.json", asdict(failure))


def read_failure(attempt: RunFolder, rank: int) -> Failure | None:
    """Return the recorded failure of a rank, or None if there is no valid record."""
    content = read_json(attempt.attempt_folder / f"failure-{rank}.json")
    try:
        return Failure(Cause(content["cause"]), str(content["message"]), float(content["time"]))
    except (KeyError, TypeError, ValueError):
        return None
