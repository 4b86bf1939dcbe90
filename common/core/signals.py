"""The signals that ask a run to stop."""

from __future__ import annotations

import signal

from common.core.errors import EXIT_RESUMABLE

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
STOPPED_STATUSES = (EXIT_RESUMABLE, *(128 + number for number in STOP_SIGNALS))
"""Exit statuses after a stop request; 128 + signal if it arrived before the process could handle it."""
REQUESTED_STOP_STATUSES = (EXIT_RESUMABLE, 128 + signal.SIGUSR2)
"""Exit statuses of a job's ranks after a stop request, without SIGTERM: srun sends it to all ranks if one fails."""
REPEATED_SIGNAL_SECONDS = 5.0  # signals within this time are one stop request, because make, srun and SLURM repeat them


def ignore_stop_signals() -> None:
    """Ignore STOP_SIGNALS in a process that its parent stops: SLURM signals every process of a job."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
