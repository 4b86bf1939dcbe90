"""`make logs` omits the messages of Submitit and srun. The lines are those of jobs on a local cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm.reports.log_filter import LogFilter
from tests.harness.commands import in_process_calls
from tests.harness.runs.synthetic_runs import SyntheticRun

LOG = """\
submitit INFO (2026-11-26 19:54:38,314) - Starting with JobEnvironment(job_id=11, hostname=node1, local_rank=0(1))
submitit INFO (2026-11-26 19:54:38,314) - Loading pickle: /runs/a/submit/11_submitted.pkl
+ step 1/100  loss 2.302
+ error: the loss of step 5 is nan (samples at positions 256 to 319 of epoch 0); lower optim.lr
srun: error: node1: task 0: Exited with exit code 2
srun: launch/slurm: _step_signal: Terminating StepId=6003311.0
srun: error: node2: tasks 1,3-4: Exited with exit code 75
+ not requeued: the loss of step 5 is nan
submitit WARNING (2026-11-26 19:56:51,790) - Bypassing signal SIGCONT
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: got SIGCONT
slurmstepd-node1: error: *** STEP 6003313.0 ON node1 CANCELLED AT 2026-11-26T19:56:53 ***
+ slurmstepd-node1: error: *** JOB 6003313 ON node1 CANCELLED AT 2026-11-26T19:56:53 DUE TO TIME LIMIT ***
srun: forcing job termination
+ srun: error: node2: task 1: Killed
+ srun: error: node2: task 1: Exited with exit code 76
srun: Force Terminated StepId=6003312.0
submitit INFO (2026-11-26 19:53:39,752) - Job completed successfully
+ submitit ERROR (2026-11-26 19:53:39,752) - Could not dump error:
+ srun: warning: can't honor --ntasks-per-node
+ the last line has no end\
"""
KEPT = "\n".join(line.removeprefix("+ ") for line in LOG.splitlines() if line.startswith("+ "))
RAW = LOG.replace("\n+ ", "\n")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_parts_of_a_growing_log_are_filtered(size: int) -> None:
    log_filter = LogFilter()
    parts = [RAW[start : start + size] for start in range(0, len(RAW), size)]
    output = "".join(log_filter.select_lines(part, is_last=False) for part in parts)
    assert output == KEPT.removesuffix("the last line has no end")
    assert output + log_filter.select_lines("", is_last=True) == KEPT


@pytest.mark.parametrize("options", [(), ("--follow=1",)], ids=str)
def test_the_whole_log_is_shown_on_request(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = SyntheticRun(steps=10).write(tmp_path)
    folder.list_attempts()[-1].log_file(0).write_text(f"{RAW}\n")
    for raw, expected in (("0", KEPT), ("1", RAW)):
        completed = in_process_calls.call_verb("logs", f"--raw={raw}", *options, "--", str(folder.path))
        assert completed.stdout.startswith(f"{expected}\n")
    refused = in_process_calls.call_verb("logs", "--raw=2", "--", str(folder.path), status=2)
    assert refused.stderr == "error: RAW must be 0 or 1 (got '2')\n"
