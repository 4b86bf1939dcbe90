"""The program that a rank of an elastic job becomes when it cannot reach its coordinator any more. Imports no torch.

    python -m slurm.scheduling.orphaned_rank RUN_FOLDER FIRST_HOST

The process of the rank executes this instead. SLURM takes a lost host off a job with --no-kill and lets the job go on,
also where it was the first host, on which the job's script and the launcher were: nobody but a rank on another host is
left to queue the job again. Where only this rank's own host was cut off, the others go on and it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from common.core.errors import EXIT_RESUMABLE, UserError, exit_on_user_error
from common.distributed.rank_info import COORDINATOR
from common.runs.folder import Folder
from slurm.scheduling.requeue import is_latest_restart, is_restart_of_this_process, requeue_or_fail
from slurm.scheduling.scheduler import QUICK, Scheduler, parse_job_fields

PAUSE = 1.0  # seconds between two looks, and for the coordinator to answer
KILLED = 128 + signal.SIGKILL


def reaches_coordinator(address: str) -> bool:
    """Check that the coordinator is there: then it has given up this rank, and the others go on."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=PAUSE):
        return True
    return False


def is_attempt_over(scheduler: Scheduler, job: str, host: str) -> bool:
    """Check that SLURM has taken a host off the job, or has ended or restarted that; False where it does not answer."""
    try:
        known = parse_job_fields(scheduler.call("scontrol", "-o", "show", "job", job, patience=QUICK))
        left = scheduler.call("scontrol", "show", "hostnames", known["NodeList"]).split()
    except (UserError, KeyError):
        return False
    return host not in left or not is_restart_of_this_process(known)


def main(path: str, first_host: str) -> int:
    """Wait until the coordinator can be reached, the job has ended, or SLURM has taken the first host off it."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a notice of preemption: nobody else would queue the job again
    folder, job, scheduler = Folder(Path(path)), os.environ["SLURM_JOB_ID"], Scheduler("SLURM")
    while not reaches_coordinator(os.environ[COORDINATOR]) and not folder.result:
        if is_attempt_over(scheduler, job, first_host):
            if is_latest_restart(scheduler, job):  # else another rank was faster
                print(f"the first host is lost; job {job} is queued again", flush=True)
                if requeue_or_fail(folder, scheduler, job, KILLED, "") != EXIT_RESUMABLE:
                    scheduler.call("scancel", job)  # no script is left to end it
            break
        time.sleep(PAUSE)
    return 0


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(sys.argv[1], sys.argv[2]))
