"""The last line of a job's script: what becomes of a run whose processes have ended. Imports no torch.

    python -m slurm.after RUN_FOLDER EXIT_STATUS

It stands outside the step, so it is there whichever process died, rank 0 included. A run that was told to stop, or
that crashed, is started again where it was saved. One that a person must look at is not: a wrong setting, a loss that
is no number, or starts in a row that reached no new checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common import config, provenance, snapshots, tracking
from common.errors import LEFT, UserError
from common.folder import Folder, read_json, write_json
from slurm.scheduler import Scheduler


def in_vain(folder: Folder) -> int:
    """How many starts in a row, up to the newest, have saved nothing."""
    count = 0
    for attempt in reversed(folder.attempts()):
        if snapshots.of_attempt(attempt):
            break
        count += 1
    return count


def why_not_again(folder: Folder, status: int) -> str:
    """Why the job is not started again; empty if it is."""
    if status == 2:
        return "a process refused to start; see the log"
    job = read_json(folder.path / "meta.json").get("job") or {}
    if not job.get("profile", {}).get("requeue", True):
        return "the profile says cluster.requeue=false"
    allowed = tracking.settings_of(folder).checkpoint.max_restarts
    failed = in_vain(folder)
    if status != LEFT and failed > allowed:
        return f"{failed} starts in a row ended without a new checkpoint (checkpoint.max_restarts={allowed})"
    return ""


def main(path: str, status: int) -> int:
    folder = Folder(Path(path))
    result = folder.result
    if result:
        return int(result.get("exit_status", 1))
    reason = why_not_again(folder, status)
    if not reason:
        job = os.environ["SLURM_JOB_ID"]
        word = "told to stop" if status == LEFT else f"failed with exit status {status}"
        print(f"the processes were {word}; job {job} is queued again", flush=True)
        try:
            Scheduler("SLURM").call("scontrol", "requeue", job)  # ends this script, too
            return LEFT
        except UserError as error:
            reason = f"it cannot be queued again: {error}"
    steps = [row["global_step"] for row in folder.metrics()]
    ended = {"state": "failed", "exit_status": status or 1, "last_step": max(steps, default=0), "reason": reason}
    write_json(folder.path / "result.json", ended)
    provenance.amend(folder, state="failed", end=provenance.now())
    print(f"not started again: {reason}", file=sys.stderr)
    return status or 1


if __name__ == "__main__":
    with config.user_errors():
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
