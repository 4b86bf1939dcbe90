"""Claims record which process or SLURM job runs an attempt, and show whether the attempt is still running.

attempts/0002/claim.json    host, boot id, pid and start time of the process that controls the attempt; the launcher
                            that started this process, with its restart count; `ended` is true once a command has
                            found that the attempt has ended

An attempt is one start of a run. At most one attempt of a run trains at a time, so a new attempt first reads the claim
of the newest existing attempt. Attempts that older versions of this project started have no claim. Only meta.json and
heartbeats show whether these attempts are still running. This module does not import torch.
"""

from __future__ import annotations

import enum
import os
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.config import config
from common.runs import provenance
from common.runs.folder import CLAIM, RunFolder, read_json, write_json
from common.system.errors import RunTakenError, UserError
from common.system.processes import Process
from common.system.text import format_duration

STOPPING_SECONDS = 60.0
"""Seconds for which a new attempt waits for an earlier attempt that is stopping."""
SILENT_SECONDS = 60.0
"""Seconds without activity after which an attempt is considered ended if this host cannot check the process."""
SILENT_STOPPING_SECONDS = 15.0
"""Limit that replaces SILENT_SECONDS for an attempt that is stopping, because it only has to save a checkpoint."""
WITHDRAWAL_SECONDS = 1.0
"""Seconds that an attempt waits before a newer attempt supersedes it. Until then, the newer attempt may withdraw."""
POLL_SECONDS = 0.2
UNNAMED_LAUNCH = "none"
"""Name of a torchrun launch if the user has not set a name with --rdzv-id."""


class ProcessState(enum.Enum):
    """State of the process that runs an attempt."""

    ALIVE = "alive"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Claim:
    """Content of the claim.json file of an attempt."""

    attempt: RunFolder
    process: Mapping[str, Any]
    """Host, boot id, pid and start time of the process, as returned by `provenance.identify_process`."""
    starter: str
    """Id of the SLURM job or torchrun launch that started the process, or an empty string for a local run."""
    restart: int
    """Number of times that SLURM or torchrun had restarted the run when the attempt was claimed."""
    time: float
    """Time at which the attempt was claimed, in seconds since 1970, or 0 if the time is unknown."""
    is_ended: bool

    @classmethod
    def read(cls, attempt: RunFolder) -> Claim | None:
        """Read the claim of an attempt. Return None if the claim is missing or damaged."""
        content = read_json(attempt.attempt_folder / CLAIM)
        process = content.get("process")
        restart = content.get("restart", 0)
        if not isinstance(process, dict) or not isinstance(restart, int):
            return None
        if not all(isinstance(process.get(name), int) for name in ("pid", "pid_started")):
            return None
        starter = str(content.get("starter") or "")
        is_ended = bool(content.get("ended"))
        claimed_at = provenance.parse_utc_time(content.get("time"))
        return cls(attempt, process, starter, restart, claimed_at, is_ended)

    @property
    def job(self) -> str:
        """Id of the SLURM job that claimed the attempt, or an empty string if no SLURM job claimed it."""
        return self.starter.rpartition(" ")[2] if self.starter.startswith("slurm ") else ""

    def check_process(self) -> ProcessState:
        """Return the state of the process, or UNKNOWN if this host cannot check the process."""
        if self.is_ended:
            return ProcessState.ENDED
        is_alive = is_process_alive(self.process)
        if is_alive:
            return ProcessState.ALIVE
        # An elastic job can continue after the process that claimed the attempt has exited. Only SLURM can report
        # whether the job is still running.
        return ProcessState.UNKNOWN if is_alive is None or self.job else ProcessState.ENDED

    def describe(self) -> str:
        """Return a short description of the attempt and its process."""
        host = self.process.get("host")
        machine = "this machine" if host == socket.gethostname() else f"host {host}"
        job = f"job {self.job}, " if self.job else ""
        return f"attempt {self.attempt.number}, {job}process {self.process['pid']} on {machine}"


def is_process_alive(process: Mapping[str, Any]) -> bool | None:
    """Return whether a process is running. `process` is a dict as returned by `identify_process`.

    Returns None if this host cannot check the process.
    """
    if process.get("pid_namespace") not in (None, "", provenance.read_pid_namespace()):
        return None  # in another pid namespace, the same pid refers to another process
    is_alive = Process(process.get("pid", 0), process.get("pid_started", 0)).is_alive()
    if process.get("host") == socket.gethostname():
        return is_alive
    # The host may have been renamed, or this process may run in another container. If the boot id is the same, a
    # process that is found here is alive, but a process that is not found here may still be running elsewhere.
    return True if is_alive and process.get("boot") == provenance.read_boot_id() else None


def read_restart_count() -> int:
    """Return how many times SLURM or torchrun has restarted the ranks of this process."""
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def find_newest_claim(folder: RunFolder) -> Claim | None:
    """Return the claim of the newest attempt, or None if that attempt has no claim."""
    attempts = folder.list_attempts()
    return Claim.read(attempts[-1]) if attempts else None


def find_live_claims(folder: RunFolder) -> list[Claim]:
    """Return the claims of all attempts whose process is known to be running."""
    claims = [Claim.read(attempt) for attempt in folder.list_attempts()]
    return [claim for claim in claims if claim is not None and claim.check_process() is ProcessState.ALIVE]


def mark_ended(attempt: RunFolder) -> None:
    """Record in claim.json that an attempt has ended, for hosts that cannot check its process.

    Raises UserError if the file cannot be written.
    """
    path = attempt.attempt_folder / CLAIM
    if path.exists():
        write_json(path, read_json(path) | {"ended": True})


# ---- claiming


def claim_next_attempt(folder: RunFolder) -> RunFolder:
    """Claim the next attempt of a run for this process.

    Raises RunTakenError if an earlier attempt is alive. In this case, the new attempt is deleted.
    """
    wait_for_earlier_attempt(folder)
    content = {
        "process": provenance.identify_process(),
        "starter": provenance.identify_launcher(),
        "restart": read_restart_count(),
        "time": provenance.format_utc_now(),
    }
    attempt = folder.claim_attempt(content)
    try:
        # A process on another host may have claimed the previous attempt in the meantime.
        raise_if_attempt_is_alive(attempt)
    except RunTakenError:
        attempt.withdraw_attempt()
        raise
    return attempt


def wait_for_earlier_attempt(folder: RunFolder) -> None:
    """Wait until an attempt that is stopping has ended.

    Raises RunTakenError if an attempt is running and not stopping, or if it is still alive after STOPPING_SECONDS.
    """
    deadline = time.monotonic() + STOPPING_SECONDS
    is_announced = False
    while True:
        try:
            raise_if_attempt_is_alive(folder)
            return
        except RunTakenError:
            if not folder.result or time.monotonic() > deadline:
                raise
        claim = find_earlier_claim(folder)
        if claim is not None and not is_announced:
            print_waiting_message(claim)
            is_announced = True
        time.sleep(POLL_SECONDS)


def print_waiting_message(claim: Claim) -> None:
    """Print that this command is waiting for an attempt that is stopping."""
    print(f"waiting for the previous attempt to stop ({claim.describe()})", flush=True)


def format_live_attempt_remedy(folder: RunFolder) -> str:
    """Return the remedy for a command that failed because an attempt is alive."""
    return f"wait for it or stop it: make cancel RUN={shlex.quote(folder.reference)}"


def raise_if_attempt_is_alive(folder: RunFolder) -> None:
    """Raise RunTakenError if the newest attempt before attempt `folder.number` is alive.

    If `folder.number` is 0, the newest attempt of the run is checked.
    """
    claim = find_earlier_claim(folder)
    if claim is None or is_replaced_by_this_process(claim):
        return
    life = claim.check_process()
    if life is ProcessState.ENDED:
        return
    state = "is stopping" if folder.result else "is already running"
    problem = f"{folder.path.name} {state} ({claim.describe()})"
    if life is ProcessState.ALIVE:
        raise RunTakenError(f"{problem}; {format_live_attempt_remedy(folder)}")
    if is_known_to_have_ended(folder):
        return
    silent_seconds = compute_seconds_since_last_write(claim.attempt)
    limit = SILENT_STOPPING_SECONDS if folder.result else max(SILENT_SECONDS, read_step_timeout(folder))
    if silent_seconds < limit:
        age = format_duration(silent_seconds)
        raise RunTakenError(
            f"{problem}; this host cannot check whether the process still exists. The last activity was {age} ago; "
            f"the attempt is considered ended after {limit:.0f} s without activity"
        )


def find_earlier_claim(folder: RunFolder) -> Claim | None:
    """Return the claim of the newest attempt before attempt `folder.number`, or None if there is no claim.

    If `folder.number` is 0, the newest attempt of the run is used.
    """
    for attempt in reversed(folder.list_attempts()):
        if folder.number and attempt.number >= folder.number:
            continue
        claim = Claim.read(attempt) or find_recorded_process(attempt)
        if claim is not None or attempt.attempt_folder.exists():
            return claim
        # The attempt was withdrawn after it was listed, because an earlier attempt is alive.
    return None


def find_recorded_process(attempt: RunFolder) -> Claim | None:
    """Return a claim built from meta.json for an attempt that an older version of this project started.

    Returns None if the process listed in meta.json is not known to be alive.
    """
    history = provenance.read_metadata(attempt)["history"]
    process = history[-1] if history else {}
    if process.get("attempt") != attempt.number or not is_process_alive(process):
        return None
    starter = str(process.get("starter") or "")
    return Claim(attempt, process, starter, restart=0, time=0.0, is_ended=False)


def read_step_timeout(folder: RunFolder) -> float:
    """Return the maximum time, in seconds, that a step of a run may take without writing a file.

    The time is the value of launch.step_timeout, or 0 if this setting is unknown.
    """
    try:
        settings = config.read_settings(folder.path)
        return float(settings.get("launch.step_timeout", 0.0))
    except (UserError, TypeError, ValueError):
        return 0.0


def is_replaced_by_this_process(claim: Claim) -> bool:
    """Return whether SLURM or torchrun started this process to replace the claim's process."""
    starter = provenance.identify_launcher()
    if starter is None or read_restart_count() <= claim.restart:
        return False
    if starter == claim.starter:
        return True
    # A torchrun agent on another host may take over. Both agents have the same launch name if the user set it.
    kind, name, *_ = starter.split(" ")
    has_name = kind == "torchrun" and name != UNNAMED_LAUNCH
    is_other_host = claim.process.get("host") != socket.gethostname()
    is_same_launch = claim.starter.startswith(f"{kind} {name} ")
    return has_name and is_other_host and is_same_launch


def is_known_to_have_ended(folder: RunFolder) -> bool:
    """Return whether result.json shows that the attempt has ended.

    `make cancel` writes a result without a reason before the attempt ends, so this function ignores such a result.
    """
    result = folder.result
    if not result:
        return False
    return result.get("state") != "cancelled" or bool(result.get("reason"))


def compute_seconds_since_last_write(attempt: RunFolder) -> float:
    """Return the seconds since any rank of an attempt last wrote a file."""
    return max(0.0, time.time() - attempt.find_last_write_time())


# ---- an attempt that trains


def raise_if_superseded(attempt: RunFolder) -> None:
    """Raise RunTakenError if a newer attempt has replaced `attempt`."""
    if not attempt.is_superseded:
        return
    time.sleep(WITHDRAWAL_SECONDS)
    newer_attempts = [other for other in attempt.list_attempts() if other.number > attempt.number]
    if not newer_attempts:
        return
    newest = newer_attempts[-1]
    claim = Claim.read(newest)
    host = f" on host {claim.process.get('host')}" if claim else ""
    raise RunTakenError(
        f"attempt {attempt.number} of {attempt.path.name} was superseded by attempt {newest.number}{host}; "
        "stopping without saving"
    )


class AttemptWatch:
    """Monitor that checks whether an attempt's folder still exists and whether a newer attempt has started."""

    RETURN_SECONDS = 3.0
    """Seconds to wait until a missing folder reappears. A network disk may be unavailable for a moment."""

    def __init__(self, attempt: RunFolder) -> None:
        self.attempt = attempt
        # The inode number of an open folder does not change, even on disks that renumber files.
        self.handle = os.open(attempt.attempt_folder, os.O_PATH | os.O_DIRECTORY)

    def has_folder(self) -> bool:
        """Return whether the attempt's folder still exists at its original path."""
        try:
            current = self.attempt.attempt_folder.stat()
        except OSError:
            return False
        return os.path.samestat(current, os.fstat(self.handle))

    def find_stop_reason(self, step: int) -> str:
        """Return why this attempt must stop after a step, or an empty string if it can continue."""
        deadline = time.monotonic() + self.RETURN_SECONDS
        while not self.has_folder():
            if time.monotonic() > deadline:
                return self.describe_missing_folder(step)
            time.sleep(POLL_SECONDS)
        try:
            raise_if_superseded(self.attempt)
        except RunTakenError as taken:
            return str(taken)
        return ""

    def describe_missing_folder(self, step: int) -> str:
        """Return a message that names the missing folder and a remedy."""
        has_run = (self.attempt.path / "config.yaml").exists()
        path = self.attempt.attempt_folder if has_run else self.attempt.path
        remedy = f"move it back, then resume with: make exp RESUME={shlex.quote(self.attempt.reference)}"
        return f"{path} was moved or deleted, so training stopped after step {step}; {remedy}"

    def close(self) -> None:
        """Close the folder handle."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1
