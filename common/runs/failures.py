"""Failure records: why a rank failed, for the diagnosis of the run. This module does not import torch.

A rank that fails writes failure-RANK.json to the folder of its attempt. A rank of a SLURM job also writes a record for
the job (see slurm/scheduling/job_failures.py), which exists even if the rank fails before its attempt has a folder. A
rank that is killed by a signal has a record only if it has failed before, such as a rank that NCCL ends after a
timeout. Otherwise, its launcher or SLURM reports the signal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.runs.folder import RunFolder, read_json, write_json
from common.system import foreign_text
from common.system.causes import PEER_CAUSES, Cause
from common.system.errors import MachineError, UserError


@dataclass(frozen=True)
class Failure:
    """Failure of one rank."""

    cause: Cause
    message: str
    """Error message in one line."""
    time: float
    """Time of the failure in seconds since 1970."""

    @classmethod
    def from_error(cls, error: BaseException) -> Failure:
        """Return the failure of a rank that ends now because of an exception."""
        return cls(foreign_text.classify_error(error), join_first_and_last_line(describe_error(error)), time.time())

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Failure | None:
        """Return the failure in the content of a record, or None if the content is not valid."""
        try:
            return cls(Cause(content["cause"]), str(content["message"]), float(content["time"]))
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def blames_peer(self) -> bool:
        """Whether another rank may have caused this failure."""
        return self.cause in PEER_CAUSES


def describe_error(error: BaseException) -> str:
    """Return the message of an exception, after its type unless the message is for the user."""
    if isinstance(error, SystemExit):
        return describe_system_exit(error)
    if isinstance(error, UserError | MachineError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def describe_system_exit(error: SystemExit) -> str:
    """Return how a rank ended that called `sys.exit`, whose argument is an exit status or a message."""
    if isinstance(error.code, str):
        return f"exited with the message: {error.code}"
    return f"exited with status {error.code or 0} without an error message"


def join_first_and_last_line(text: str) -> str:
    """Return a message in one line. The last line of a traceback in the text is the error itself."""
    lines = text.strip().splitlines() or [""]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}"


def write_failure(attempt: RunFolder, rank: int, failure: Failure) -> None:
    """Record the failure of a rank. If the disk fails, the failure is not recorded."""
    with contextlib.suppress(UserError, OSError):
        write_json(attempt.attempt_folder / f"failure-{rank}.json", asdict(failure))


def read_failure(attempt: RunFolder, rank: int) -> Failure | None:
    """Return the recorded failure of a rank, or None if there is no valid record."""
    return Failure.from_content(read_json(attempt.attempt_folder / f"failure-{rank}.json"))
