"""Program that replaces a rank of an elastic job when the coordinator is unreachable.

    python -m slurm.scheduling.orphaned_rank RUN_FOLDER FIRST_HOST

The rank's process executes this program instead of its own. With --no-kill, SLURM removes a lost host from a job and
continues the job. SLURM may also remove the first host, which runs the job script and the launcher. If the first host
is lost, only a rank on another host can requeue the job. If only the host of this rank was disconnected, the other
ranks continue and this program exits. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from common.ranks.rank_info import COORDINATOR_VARIABLE
from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.errors import UserError, exit_on_user_error
from common.system.exit_status import EXIT_RESUMABLE
from common.system.output import discard_unwritable_output
from slurm.scheduling.requeue import is_latest_restart, is_restart_of_this_process, requeue_job_or_record_failure
from slurm.scheduling.scheduler import STATUS_TIMEOUT, Scheduler, parse_job_fields

POLL_SECONDS = 1.0
CONNECT_TIMEOUT = 1.0
KILLED = 128 + signal.SIGKILL


def reaches_coordinator(address: str) -> bool:
    """Return whether the coordinator is reachable.

    A reachable coordinator has removed this rank from the run, and the other ranks continue.
    """
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT):
        return True
    return False


def is_attempt_over(scheduler: Scheduler, job: str, host: str) -> bool:
    """Return whether SLURM has ended or restarted the job, or has removed `host` from the job.

    Returns False if SLURM does not answer.
    """
    try:
        fields = parse_job_fields(scheduler.run_command("scontrol", "-o", "show", "job", job, timeout=STATUS_TIMEOUT))
        hosts = scheduler.run_command("scontrol", "show", "hostnames", fields["NodeList"]).split()
    except (UserError, KeyError):
        return False
    return host not in hosts or not is_restart_of_this_process(fields)


def main(path: str, first_host: str) -> int:
    """Requeue the job if the first host is lost. Return 0 when the coordinator answers or the job ends."""
    # Preemption must not end the only process that can requeue the job.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    folder = RunFolder(Path(path))
    job = provenance.read_job_id()
    scheduler = Scheduler("SLURM")
    while not reaches_coordinator(os.environ[COORDINATOR_VARIABLE]) and not folder.result:
        if not is_attempt_over(scheduler, job, first_host):
            time.sleep(POLL_SECONDS)
            continue
        if is_latest_restart(scheduler, job):  # False if another rank has already requeued the job
            print(f"the first host is lost; requeueing job {job}", flush=True)
            if requeue_job_or_record_failure(folder, scheduler, job, KILLED, "") != EXIT_RESUMABLE:
                scheduler.run_command("scancel", job)  # the job script, which would end the job, was lost with the host
        break
    return 0


if __name__ == "__main__":
    discard_unwritable_output()
    with exit_on_user_error():
        sys.exit(main(sys.argv[1], sys.argv[2]))
