"""Conversion of the output of SLURM commands to causes. This module does not import torch."""

from __future__ import annotations

from common.system.causes import Cause
from common.system.foreign_text import find_first_match

JOB_STATE_CAUSES = {
    "TIMEOUT": Cause.JOB_TIME_LIMIT,
    "NODE_FAIL": Cause.HOST_FAILED,
    "OUT_OF_MEMORY": Cause.JOB_OUT_OF_MEMORY,
    "OUT_OF_ME": Cause.JOB_OUT_OF_MEMORY,  # abbreviated by squeue
}
OUTPUT_PATTERNS = (
    (r"is DOWN", Cause.CONTROLLER_DOWN),
    (r"Invalid job id", Cause.UNKNOWN_JOB),
    (r"Could not establish a configuration source", Cause.NO_CONFIGURATION),
)


def classify_job_state(state: str) -> Cause:
    """Return the cause of a failure that SLURM reports as the state of a job, such as NODE_FAIL."""
    return JOB_STATE_CAUSES.get(state, Cause.OTHER)


def classify_output(text: str) -> Cause:
    """Return the cause in the output of a SLURM command that failed."""
    return find_first_match(text, OUTPUT_PATTERNS)


def is_controller_up(answer: str) -> bool:
    """Return whether a SLURM controller responds, according to the answer of `scontrol ping`."""
    return "is UP" in answer
