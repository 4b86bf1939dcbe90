"""Causes of failures. Code that handles a failure compares causes and does not search messages."""

from __future__ import annotations

import enum


class Cause(enum.StrEnum):
    """Cause of a failure, as recorded in result.json and in the failure records of ranks."""

    OTHER = "other"
    """A cause that no code distinguishes from others."""
    SOURCE_ERROR = "source_error"
    """The source code of the run, and not a device or the network, caused the failure."""
    DIVERGED = "diverged"
    """The loss or a parameter is NaN or infinite."""
    NO_VALID_CHECKPOINT = "no_valid_checkpoint"
    OUT_OF_MEMORY = "out_of_memory"
    THREAD_SHORTAGE = "thread_shortage"
    """The system cannot start another thread or process."""
    DISK_FULL = "disk_full"
    DISK_READ_ONLY = "disk_read_only"
    FILE_TOO_LARGE = "file_too_large"
    """A file would exceed the size limit (ulimit -f)."""
    DAMAGED_DATA = "damaged_data"
    """The data set is damaged, or differs from the data on which the run was trained."""
    MISSING_PACKAGE = "missing_package"
    KILLED = "killed"
    """A signal ended a rank. The reason in result.json names the rank and the signal."""
    EXITED = "exited"
    """A rank exited without an error message, for example with `sys.exit`. The reason names the exit status."""
    TIMEOUT = "timeout"
    """A collective or a message exceeded its time limit."""
    SILENT_RANK = "silent_rank"
    """A collective exceeded its time limit, and the message names the ranks that did not respond."""
    LOST_PEER = "lost_peer"
    """The connection with another rank failed."""
    UNREACHABLE = "unreachable"
    """A rank or host could not be reached while the ranks were connecting."""
    RUN_TAKEN = "run_taken"
    """Another attempt has taken over the run, or the folder of the attempt was deleted."""
    JOB_TIME_LIMIT = "job_time_limit"
    JOB_OUT_OF_MEMORY = "job_out_of_memory"
    """SLURM ended a job that exceeded its memory."""
    HOST_FAILED = "host_failed"
    CONTROLLER_DOWN = "controller_down"
    """The SLURM controller does not respond."""
    UNKNOWN_JOB = "unknown_job"
    """The SLURM controller does not know the job."""
    NO_CONFIGURATION = "no_configuration"
    """The commands of SLURM find no configuration."""


PEER_CAUSES = frozenset({Cause.TIMEOUT, Cause.SILENT_RANK, Cause.LOST_PEER, Cause.UNREACHABLE})
"""Causes of failures that another rank may have caused."""
