"""Functions that use claims, /proc and SLURM to determine whether an attempt of a run is alive.

This module does not import torch.
"""

from __future__ import annotations

import time

from common.runs import claims, provenance
from common.runs.claims import Claim, ProcessState
from common.runs.folder import RunFolder
from common.system.errors import RunTakenError
from slurm.reports.status import find_scheduler
from slurm.scheduling.scheduler import STATUS_TIMEOUT

POLL_SECONDS = 0.5


def check_claim_liveness(claim: Claim) -> ProcessState:
    """Return whether the attempt of a claim is alive, has ended, or cannot be checked.

    If the attempt belongs to a SLURM job, SLURM reports the state of the job. Otherwise, or if SLURM does not answer,
    this host checks the process of the attempt.
    """
    meta = provenance.read_metadata(claim.attempt)
    job = meta.get("job")
    if claim.is_ended or not claim.job or not job:
        return claim.check_process()
    scheduler = find_scheduler(meta)
    if scheduler is None:
        return ProcessState.ENDED  # the local cluster is down, so its jobs have ended
    state = scheduler.read_job_state(claim.job, STATUS_TIMEOUT)[0]
    if state == "UNKNOWN":
        return claim.check_process()
    return ProcessState.ALIVE if state == "RUNNING" else ProcessState.ENDED


def is_stopping(folder: RunFolder) -> bool:
    """Return whether the newest attempt of a run is known to be alive although the run has a result.

    `make cancel` writes the result before the attempt ends.
    """
    claim = claims.find_newest_claim(folder)
    return claim is not None and bool(folder.result) and check_claim_liveness(claim) is ProcessState.ALIVE


def wait_for_earlier_attempt(folder: RunFolder) -> None:
    """Wait until an earlier attempt that is stopping has ended, and record the end.

    Raises RunTakenError if the attempt is not stopping, or is still alive after STOPPING_SECONDS.
    """
    claim = claims.find_newest_claim(folder)
    deadline = time.monotonic() + claims.STOPPING_SECONDS
    is_announced = False
    while claim is not None and (life := check_claim_liveness(claim)) is not ProcessState.UNKNOWN:
        if life is ProcessState.ENDED:
            if not claim.is_ended:  # the next attempt may run on a host that cannot see this process
                claims.mark_ended(claim.attempt)
            return
        is_stopping = bool(folder.result)  # a run writes its result before the attempt ends
        if not is_stopping or time.monotonic() > deadline:
            problem = f"{folder.path.name} is still running ({claim.describe()})"
            raise RunTakenError(f"{problem}; {claims.format_live_attempt_remedy(folder)}")
        if not is_announced:
            claims.print_waiting_message(claim)
            is_announced = True
        time.sleep(POLL_SECONDS)
    # Without a claim or a known state, the process in meta.json and the time of the last write decide.
    claims.wait_for_earlier_attempt(folder)
