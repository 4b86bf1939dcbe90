"""Whether an attempt of a run is alive, according to its claim, /proc and SLURM. Imports no torch."""

from __future__ import annotations

import time

from common.core.errors import RunTaken
from common.runs import claims, provenance
from common.runs.claims import Claim, Life
from common.runs.folder import Folder
from slurm.reports.status import find_scheduler
from slurm.scheduling.scheduler import QUICK

POLL_SECONDS = 0.5


def judge_claim(claim: Claim) -> Life:
    """Judge an attempt of the recorded job by SLURM, any other by its process on this host."""
    meta = provenance.read_metadata(claim.attempt)
    job = meta.get("job")
    if claim.ended or not claim.job or not job:
        return claim.judge()
    scheduler = find_scheduler(meta)
    if scheduler is None:
        return Life.ENDED  # with the local cluster
    state, _ = scheduler.read_job_state(claim.job, QUICK)
    if state == "UNKNOWN":
        return claim.judge()
    return Life.ALIVE if state == "RUNNING" else Life.ENDED


def wait_for_earlier_attempt(folder: Folder) -> None:
    """Wait until an attempt that is stopping has ended, and record its end.

    Raises RunTaken if an attempt keeps running.
    """
    claim = claims.find_newest_claim(folder)
    deadline = time.monotonic() + claims.STOPPING_SECONDS
    is_announced = False
    while claim is not None and (life := judge_claim(claim)) is not Life.UNKNOWN:
        if life is Life.ENDED:
            if not claim.ended:  # the host of the next attempt may not see the process
                claims.mark_ended(claim.attempt)
            return
        if not folder.result or time.monotonic() > deadline:
            problem = f"{folder.path.name} is still running ({claim.describe()})"
            raise RunTaken(f"{problem}; {claims.format_remedy(folder)}")
        if not is_announced:
            claims.announce_wait(claim)
            is_announced = True
        time.sleep(POLL_SECONDS)
    claims.wait_for_earlier_attempt(folder)
