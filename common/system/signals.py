"""Signals that request a run to stop, and the exit statuses after such a request."""

from __future__ import annotations

import signal

from common.system.errors import EXIT_RESUMABLE

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
STOPPED_STATUSES = (EXIT_RESUMABLE, *(128 + number for number in STOP_SIGNALS))
"""Exit statuses after a stop request: 128 + signal if the signal arrived before the process could handle it."""
REQUESTED_STOP_STATUSES = (EXIT_RESUMABLE, 128 + signal.SIGUSR2)
"""Exit statuses of ranks in a job after a stop request.

SIGTERM is not included, because srun also sends SIGTERM to all ranks if one rank fails.
"""
# Signals within this time count as one stop request, because make, srun and SLURM repeat signals.
REPEATED_SIGNAL_SECONDS = 5.0


def ignore_stop_signals() -> None:
    """Ignore STOP_SIGNALS in a process that its parent stops.

    SLURM sends these signals to every process of a job.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
