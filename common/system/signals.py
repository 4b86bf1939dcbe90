"""Signals that request a stop of a run, and the exit statuses after a stop request."""

from __future__ import annotations

import signal

from common.system.exit_status import EXIT_RESUMABLE

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
STOPPED_STATUSES = (EXIT_RESUMABLE, *(128 + number for number in STOP_SIGNALS))
"""Exit statuses after a stop request. 128 + signal number means that the process had not installed its handler yet."""
REQUESTED_STOP_STATUSES = (EXIT_RESUMABLE, 128 + signal.SIGUSR2)
"""Exit statuses which show that a rank of a SLURM job exited because of a stop request.

SIGTERM is not included, because srun also sends SIGTERM to all ranks if one rank fails.
"""
# All signals within this time count as one stop request, because make, srun and SLURM repeat signals.
REPEATED_SIGNAL_SECONDS = 5.0


def ignore_stop_signals() -> None:
    """Ignore STOP_SIGNALS in a child process, which the parent process stops instead.

    SLURM sends these signals to every process of a job.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
