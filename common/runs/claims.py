"""Claims: which process or job is at an attempt, and whether it still is. Imports no torch.

attempts/0002/claim.json    host, boot, pid and start time of the process that conducts the attempt; the launcher that
                            started it, with its restart count; `ended` once a command has found that it is over

A run has one attempt that trains. Whoever starts another one reads the claim of the newest attempt first. A run folder
of older source has attempts without claims; then meta.json and heartbeats are all that is known.
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
from common.core.errors import RunTaken, UserError
from common.core.processes import Process
from common.core.text import format_duration
from common.runs import provenance
from common.runs.folder import CLAIM, Folder, read_json, write_json

STOPPING_SECONDS = 60.0
"""Time for which a start waits until an attempt that was told to stop has ended."""
SILENT_SECONDS = 60.0
"""Without a sign of life for so long, an attempt whose process cannot be seen from here counts as ended."""
SILENT_STOPPING_SECONDS = 15.0
"""The same for an attempt that was told to stop: it only saves."""
WITHDRAWAL_SECONDS = 1.0
"""Time after which a newer attempt counts: one that finds this one alive withdraws a moment after it appeared."""
POLL_SECONDS = 0.2
UNNAMED_LAUNCH = "none"
"""torchrun's name of a launch to which the user gave none."""


class Life(enum.Enum):
    """Whether an attempt's process runs."""

    ALIVE = "alive"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Claim:
    """Content of a claim."""

    attempt: Folder
    process: Mapping[str, Any]
    """host, boot, pid and pid_started, as provenance.identify_process returns them."""
    starter: str
    """The SLURM job or torchrun that started the process; empty for a process that started its ranks itself."""
    restart: int
    """How often the starter had started its processes again."""
    ended: bool

    @classmethod
    def read(cls, attempt: Folder) -> Claim | None:
        """Read an attempt's claim; None where it has none or that is damaged."""
        content = read_json(attempt.attempt / CLAIM)
        process, restart = content.get("process"), content.get("restart", 0)
        if not isinstance(process, dict) or not isinstance(restart, int):
            return None
        types_are_right = isinstance(process.get("pid"), int) and isinstance(process.get("pid_started"), int)
        if not types_are_right:
            return None
        return cls(attempt, process, str(content.get("starter") or ""), restart, bool(content.get("ended")))

    @property
    def job(self) -> str:
        """Id of the SLURM job that has claimed the attempt; empty for other processes."""
        words = self.starter.split(" ")
        return words[-1] if words[0] == "slurm" else ""

    def judge(self) -> Life:
        """Judge by what this host can see of the process."""
        if self.ended:
            return Life.ENDED
        is_alive = is_process_alive(self.process)
        if is_alive:
            return Life.ALIVE
        # An elastic job continues without the process that claimed the attempt; only SLURM knows whether the job runs.
        return Life.UNKNOWN if is_alive is None or self.job else Life.ENDED

    def describe(self) -> str:
        """Describe the attempt and its process in a few words."""
        host, pid = self.process.get("host"), self.process["pid"]
        where = "this machine" if host == socket.gethostname() else f"host {host}"
        job = f"job {self.job}, " if self.job else ""
        return f"attempt {self.attempt.number}, {job}process {pid} on {where}"


def is_process_alive(entry: Mapping[str, Any]) -> bool | None:
    """Check for a running process as identify_process names it; None where this host cannot tell."""
    if entry.get("pid_namespace") not in (None, "", provenance.read_pid_namespace()):
        return None  # a container of this host, or another one, has other pids
    is_alive = Process(entry.get("pid", 0), entry.get("pid_started", 0)).is_alive()
    if entry.get("host") == socket.gethostname():
        return is_alive
    # a host that was renamed meanwhile has the same kernel; but so has another container
    return True if is_alive and entry.get("boot") == provenance.read_boot_id() else None


def read_restart_count() -> int:
    """Return how often SLURM or torchrun has started this process's ranks again."""
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def find_newest_claim(folder: Folder) -> Claim | None:
    """Find the claim of the newest attempt; None where that has none."""
    attempts = folder.attempts()
    return Claim.read(attempts[-1]) if attempts else None


def find_live_claims(folder: Folder) -> list[Claim]:
    """Find the claims of all attempts whose process runs as far as this host can see."""
    claims = [Claim.read(attempt) for attempt in folder.attempts()]
    return [claim for claim in claims if claim is not None and claim.judge() is Life.ALIVE]


def mark_ended(attempt: Folder) -> None:
    """Record that an attempt has ended, for hosts that cannot see its process. Raises UserError."""
    path = attempt.attempt / CLAIM
    if path.exists():
        write_json(path, read_json(path) | {"ended": True})


# ---- claiming


def claim_next_attempt(folder: Folder) -> Folder:
    """Claim the next attempt of a run for this process.

    Raises RunTaken where an earlier attempt is alive; then no attempt is left behind.
    """
    wait_for_earlier_attempt(folder)
    content = {
        "process": provenance.identify_process(),
        "starter": provenance.identify_launcher(),
        "restart": read_restart_count(),
        "time": provenance.format_utc_now(),
    }
    claimed = folder.claim_attempt(content)
    try:
        # A process of another host may have claimed the attempt before this one a moment ago.
        refuse_live_attempt(claimed)
    except RunTaken:
        claimed.withdraw_attempt()
        raise
    return claimed


def wait_for_earlier_attempt(folder: Folder) -> None:
    """Wait until an attempt that was told to stop has ended. Raises RunTaken where an attempt goes on."""
    deadline = time.monotonic() + STOPPING_SECONDS
    is_announced = False
    while True:
        try:
            refuse_live_attempt(folder)
            return
        except RunTaken:
            if not folder.result or time.monotonic() > deadline:
                raise
        claim = find_earlier_claim(folder)
        if claim is not None and not is_announced:
            announce_wait(claim)
            is_announced = True
        time.sleep(POLL_SECONDS)


def announce_wait(claim: Claim) -> None:
    """Print that a command waits for an attempt that was told to stop."""
    print(f"waiting for the previous attempt to stop ({claim.describe()})", flush=True)


def format_remedy(folder: Folder) -> str:
    """Return what to do about an attempt that is alive."""
    return f"wait for it, or make cancel RUN={shlex.quote(folder.reference)}"


def refuse_live_attempt(folder: Folder) -> None:
    """Raise RunTaken where the newest attempt, or the newest before `folder.number`, is alive."""
    claim = find_earlier_claim(folder)
    if claim is None or is_replaced_by_this_process(claim):
        return
    life = claim.judge()
    if life is Life.ENDED:
        return
    state = "is stopping" if folder.result else "is already running"
    if life is Life.ALIVE:
        raise RunTaken(f"{folder.path.name} {state} ({claim.describe()}); {format_remedy(folder)}")
    if is_known_to_have_ended(folder):
        return
    age = measure_silence(claim.attempt)
    allowed = SILENT_STOPPING_SECONDS if folder.result else max(SILENT_SECONDS, read_step_timeout(folder))
    if age < allowed:
        seen = f"its last sign of life is {format_duration(age)} old, and it counts as ended after {allowed:.0f} s"
        raise RunTaken(f"{folder.path.name} {state} ({claim.describe()}), which cannot be seen from here: {seen}")


def find_earlier_claim(folder: Folder) -> Claim | None:
    """Find the claim of the newest attempt, or of the newest before `folder.number`; None where it has none."""
    for attempt in reversed(folder.attempts()):
        if folder.number and attempt.number >= folder.number:
            continue
        claim = Claim.read(attempt) or find_recorded_process(attempt)
        if claim is not None or attempt.attempt.exists():
            return claim
        # it was withdrawn since it was listed, because one before it is alive
    return None


def find_recorded_process(attempt: Folder) -> Claim | None:
    """Find what meta.json says of an attempt of older source, where its process is seen to run; else None."""
    history = provenance.read_metadata(attempt)["history"]
    entry = history[-1] if history else {}
    if entry.get("attempt") != attempt.number or not is_process_alive(entry):
        return None
    return Claim(attempt, entry, str(entry.get("starter") or ""), restart=0, ended=False)


def read_step_timeout(folder: Folder) -> float:
    """Return the seconds that a step of a run may take, during which nothing is written; 0 if they are not known."""
    try:
        settings = config.read_config_file(folder.path / "config.yaml")
        return float(settings.get("launch.step_timeout", 0.0))
    except (UserError, TypeError, ValueError):
        return 0.0


def is_replaced_by_this_process(claim: Claim) -> bool:
    """Check that SLURM or torchrun has started this process in the place of the one that has the claim."""
    starter = provenance.identify_launcher()
    if starter is None or read_restart_count() <= claim.restart:
        return False
    if starter == claim.starter:
        return True
    kind, name, *_ = starter.split(" ")
    # An agent of torchrun may take over on another host. It goes by the name of the launch, if the user gave it one.
    has_name = kind == "torchrun" and name != UNNAMED_LAUNCH
    is_elsewhere = claim.process.get("host") != socket.gethostname()
    return has_name and is_elsewhere and claim.starter.split(" ")[:2] == [kind, name]


def is_known_to_have_ended(folder: Folder) -> bool:
    """Check for a result that an attempt writes at its end; `make cancel` writes one before it."""
    result = folder.result
    return bool(result) and (result.get("state") != "cancelled" or bool(result.get("reason")))


def measure_silence(attempt: Folder) -> float:
    """Return the seconds since a rank of an attempt wrote a file."""
    return max(0.0, time.time() - attempt.find_last_write())


# ---- an attempt that trains


def check_still_current(attempt: Folder) -> None:
    """Raise RunTaken where a newer attempt has taken the place of this one."""
    if not attempt.is_superseded:
        return
    time.sleep(WITHDRAWAL_SECONDS)
    newer = [other for other in attempt.attempts() if other.number > attempt.number]
    if not newer:
        return
    claim = Claim.read(newer[-1])
    where = f" on host {claim.process.get('host')}" if claim else ""
    raise RunTaken(
        f"attempt {attempt.number} of {attempt.path.name} was superseded by attempt {newer[-1].number}{where}; "
        "stopping without saving"
    )


class AttemptWatch:
    """Watch of a rank over its attempt: whether the folder is there, and no newer attempt is."""

    RETURN_SECONDS = 3.0
    """Time for which a folder that is gone is waited for: a network disk may be away for a moment."""

    def __init__(self, attempt: Folder) -> None:
        self.attempt = attempt
        # An open folder keeps its identity, also on disks that number files anew.
        self.handle = os.open(attempt.attempt, os.O_PATH | os.O_DIRECTORY)

    def is_there(self) -> bool:
        """Check that the attempt's folder is where it was."""
        try:
            found = self.attempt.attempt.stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self.handle))

    def find_problem(self, step: int) -> str:
        """Return why this attempt must stop after a step; empty where it may go on."""
        deadline = time.monotonic() + self.RETURN_SECONDS
        while not self.is_there():
            if time.monotonic() > deadline:
                return self.describe_loss(step)
            time.sleep(POLL_SECONDS)
        try:
            check_still_current(self.attempt)
        except RunTaken as taken:
            return str(taken)
        return ""

    def describe_loss(self, step: int) -> str:
        """Describe what is gone, and what to do."""
        has_run = (self.attempt.path / "config.yaml").exists()
        path = self.attempt.attempt if has_run else self.attempt.path
        remedy = f"move it back, then resume with: make exp RESUME={shlex.quote(self.attempt.reference)}"
        return f"{path} was moved or deleted; stopped after step {step}; {remedy}"

    def close(self) -> None:
        """Forget the folder."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1
