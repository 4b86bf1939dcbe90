"""Claims: which process or job runs an attempt, and whether it is alive. Imports no torch.

attempts/0002/claim.json    host, boot, pid and start time of the process that controls the attempt; the launcher that
                            started it, with its restart count; `ended` once a command has found that it ended

At most one attempt of a run trains. A new attempt first reads the claim of the newest one. Attempts of older source
have no claim: only meta.json and heartbeats tell whether they are alive.
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

from common.core import config
from common.core.errors import RunTakenError, UserError
from common.core.processes import Process
from common.core.text import format_duration
from common.runs import provenance
from common.runs.folder import CLAIM, RunFolder, read_json, write_json

STOPPING_SECONDS = 60.0
"""Time for which a new attempt waits for one that is stopping."""
SILENT_SECONDS = 60.0
"""Seconds without activity after which an attempt counts as ended, if its process cannot be checked from this host."""
SILENT_STOPPING_SECONDS = 15.0
"""The same for an attempt that is stopping: it only saves."""
WITHDRAWAL_SECONDS = 1.0
"""Time after which a newer attempt counts: until then it may find this one alive and withdraw."""
POLL_SECONDS = 0.2
UNNAMED_LAUNCH = "none"
"""Name that torchrun gives to a launch without a name."""


class ProcessState(enum.Enum):
    """Whether an attempt's process runs."""

    ALIVE = "alive"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Claim:
    """Content of a claim."""

    attempt: RunFolder
    process: Mapping[str, Any]
    """host, boot, pid and pid_started, as returned by provenance.identify_process."""
    starter: str
    """The SLURM job or torchrun that started the process; empty for a process that started its ranks itself."""
    restart: int
    """Number of times that the starter had restarted its processes."""
    is_ended: bool

    @classmethod
    def read(cls, attempt: RunFolder) -> Claim | None:
        """Read an attempt's claim; None if it is missing or damaged."""
        content = read_json(attempt.attempt_folder / CLAIM)
        process = content.get("process")
        restart = content.get("restart", 0)
        if not isinstance(process, dict) or not isinstance(restart, int):
            return None
        if not all(isinstance(process.get(name), int) for name in ("pid", "pid_started")):
            return None
        starter = str(content.get("starter") or "")
        is_ended = bool(content.get("ended"))
        return cls(attempt, process, starter, restart, is_ended)

    @property
    def job(self) -> str:
        """Id of the SLURM job that claimed the attempt; empty for other processes."""
        return self.starter.rpartition(" ")[2] if self.starter.startswith("slurm ") else ""

    def check_process(self) -> ProcessState:
        """Return whether the process runs, as far as this host can tell."""
        if self.is_ended:
            return ProcessState.ENDED
        is_alive = is_process_alive(self.process)
        if is_alive:
            return ProcessState.ALIVE
        # An elastic job continues without the process that claimed the attempt; only SLURM knows whether the job runs.
        return ProcessState.UNKNOWN if is_alive is None or self.job else ProcessState.ENDED

    def describe(self) -> str:
        """Describe the attempt and its process in a few words."""
        host = self.process.get("host")
        machine = "this machine" if host == socket.gethostname() else f"host {host}"
        job = f"job {self.job}, " if self.job else ""
        return f"attempt {self.attempt.number}, {job}process {self.process['pid']} on {machine}"


def is_process_alive(process: Mapping[str, Any]) -> bool | None:
    """Return whether a process in the form of identify_process runs.

    Returns None if this host cannot tell.
    """
    if process.get("pid_namespace") not in (None, "", provenance.read_pid_namespace()):
        return None  # pids of a container differ from those of its host and of other containers
    is_alive = Process(process.get("pid", 0), process.get("pid_started", 0)).is_alive()
    if process.get("host") == socket.gethostname():
        return is_alive
    # The host may have been renamed, or this may be another container: the same boot proves only that it is alive.
    return True if is_alive and process.get("boot") == provenance.read_boot_id() else None


def read_restart_count() -> int:
    """Return how often SLURM or torchrun has restarted this process's ranks."""
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def find_newest_claim(folder: RunFolder) -> Claim | None:
    """Return the claim of the newest attempt; None if it has none."""
    attempts = folder.list_attempts()
    return Claim.read(attempts[-1]) if attempts else None


def find_live_claims(folder: RunFolder) -> list[Claim]:
    """Return the claims of all attempts whose process runs, as far as this host can tell."""
    claims = [Claim.read(attempt) for attempt in folder.list_attempts()]
    return [claim for claim in claims if claim is not None and claim.check_process() is ProcessState.ALIVE]


def mark_ended(attempt: RunFolder) -> None:
    """Record that an attempt has ended, for hosts that cannot check its process. Raises UserError."""
    path = attempt.attempt_folder / CLAIM
    if path.exists():
        write_json(path, read_json(path) | {"ended": True})


# ---- claiming


def claim_next_attempt(folder: RunFolder) -> RunFolder:
    """Claim the next attempt of a run for this process.

    Raises RunTakenError if an earlier attempt is alive; then no new attempt remains.
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
        # A process of another host may have claimed the previous attempt in the meantime.
        refuse_live_attempt(attempt)
    except RunTakenError:
        attempt.withdraw_attempt()
        raise
    return attempt


def wait_for_earlier_attempt(folder: RunFolder) -> None:
    """Wait for an attempt that is stopping. Raises RunTakenError if an attempt keeps running."""
    deadline = time.monotonic() + STOPPING_SECONDS
    is_announced = False
    while True:
        try:
            refuse_live_attempt(folder)
            return
        except RunTakenError:
            if not folder.result or time.monotonic() > deadline:
                raise
        claim = find_earlier_claim(folder)
        if claim is not None and not is_announced:
            announce_wait(claim)
            is_announced = True
        time.sleep(POLL_SECONDS)


def announce_wait(claim: Claim) -> None:
    """Print that a command waits for an attempt that is stopping."""
    print(f"waiting for the previous attempt to stop ({claim.describe()})", flush=True)


def format_remedy(folder: RunFolder) -> str:
    """Return what a user can do about an attempt that is alive."""
    return f"wait for it or stop it: make cancel RUN={shlex.quote(folder.reference)}"


def refuse_live_attempt(folder: RunFolder) -> None:
    """Raise RunTakenError if the newest attempt, or the newest before `folder.number`, is alive."""
    claim = find_earlier_claim(folder)
    if claim is None or is_replaced_by_this_process(claim):
        return
    life = claim.check_process()
    if life is ProcessState.ENDED:
        return
    state = "is stopping" if folder.result else "is already running"
    problem = f"{folder.path.name} {state} ({claim.describe()})"
    if life is ProcessState.ALIVE:
        raise RunTakenError(f"{problem}; {format_remedy(folder)}")
    if is_known_to_have_ended(folder):
        return
    silent_seconds = measure_silence(claim.attempt)
    limit = SILENT_STOPPING_SECONDS if folder.result else max(SILENT_SECONDS, read_step_timeout(folder))
    if silent_seconds < limit:
        age = format_duration(silent_seconds)
        raise RunTakenError(
            f"{problem}; its process cannot be checked from this host: last activity {age} ago, counts as ended after "
            f"{limit:.0f} s without activity"
        )


def find_earlier_claim(folder: RunFolder) -> Claim | None:
    """Return the claim of the newest attempt, or of the newest before `folder.number`.

    Returns None if it has none.
    """
    for attempt in reversed(folder.list_attempts()):
        if folder.number and attempt.number >= folder.number:
            continue
        claim = Claim.read(attempt) or find_recorded_process(attempt)
        if claim is not None or attempt.attempt_folder.exists():
            return claim
        # The attempt was withdrawn after it was listed, because an earlier one is alive.
    return None


def find_recorded_process(attempt: RunFolder) -> Claim | None:
    """Return the process that meta.json names for an attempt of older source, if it is alive.

    Returns None otherwise.
    """
    history = provenance.read_metadata(attempt)["history"]
    process = history[-1] if history else {}
    if process.get("attempt") != attempt.number or not is_process_alive(process):
        return None
    starter = str(process.get("starter") or "")
    return Claim(attempt, process, starter, restart=0, is_ended=False)


def read_step_timeout(folder: RunFolder) -> float:
    """Return the seconds that a step of a run may take without writing a file.

    Returns 0 if unknown.
    """
    try:
        settings = config.read_config_file(folder.path / "config.yaml")
        return float(settings.get("launch.step_timeout", 0.0))
    except (UserError, TypeError, ValueError):
        return 0.0


def is_replaced_by_this_process(claim: Claim) -> bool:
    """Return whether SLURM or torchrun started this process as the replacement of the claim's process."""
    starter = provenance.identify_launcher()
    if starter is None or read_restart_count() <= claim.restart:
        return False
    if starter == claim.starter:
        return True
    # An agent of torchrun may take over on another host; both have the name of the launch, if the user named it.
    kind, name, *_ = starter.split(" ")
    has_name = kind == "torchrun" and name != UNNAMED_LAUNCH
    is_other_host = claim.process.get("host") != socket.gethostname()
    is_same_launch = claim.starter.startswith(f"{kind} {name} ")
    return has_name and is_other_host and is_same_launch


def is_known_to_have_ended(folder: RunFolder) -> bool:
    """Return whether an attempt wrote a result at its end.

    `make cancel` writes one before the end.
    """
    result = folder.result
    if not result:
        return False
    return result.get("state") != "cancelled" or bool(result.get("reason"))


def measure_silence(attempt: RunFolder) -> float:
    """Return the seconds since a rank of an attempt wrote a file."""
    return max(0.0, time.time() - attempt.find_last_write())


# ---- an attempt that trains


def check_still_current(attempt: RunFolder) -> None:
    """Raise RunTakenError if a newer attempt has replaced this one."""
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
    """Checks of a rank that its attempt's folder exists and that no newer attempt does."""

    RETURN_SECONDS = 3.0
    """Time to wait for a missing folder: a network disk may be unavailable for a moment."""

    def __init__(self, attempt: RunFolder) -> None:
        self.attempt = attempt
        # An open folder keeps its inode number, also on disks that renumber files.
        self.handle = os.open(attempt.attempt_folder, os.O_PATH | os.O_DIRECTORY)

    def has_folder(self) -> bool:
        """Return whether the attempt's folder is still at its path."""
        try:
            current = self.attempt.attempt_folder.stat()
        except OSError:
            return False
        return os.path.samestat(current, os.fstat(self.handle))

    def find_problem(self, step: int) -> str:
        """Return why this attempt must stop after a step; empty if it can continue."""
        deadline = time.monotonic() + self.RETURN_SECONDS
        while not self.has_folder():
            if time.monotonic() > deadline:
                return self.describe_loss(step)
            time.sleep(POLL_SECONDS)
        try:
            check_still_current(self.attempt)
        except RunTakenError as taken:
            return str(taken)
        return ""

    def describe_loss(self, step: int) -> str:
        """Return which folder is missing, with the remedy."""
        has_run = (self.attempt.path / "config.yaml").exists()
        path = self.attempt.attempt_folder if has_run else self.attempt.path
        remedy = f"move it back, then resume with: make exp RESUME={shlex.quote(self.attempt.reference)}"
        return f"{path} was moved or deleted; stopped after step {step}; {remedy}"

    def close(self) -> None:
        """Close the handle of the folder."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1
