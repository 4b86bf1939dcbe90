"""Exit statuses of runs and commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

EXIT_REFUSED = 2
"""After a UserError, such as an invalid setting."""
EXIT_RESUMABLE = 75
"""After a stop request: the run can be resumed (EX_TEMPFAIL in sysexits.h)."""
EXIT_FAILED = 76
"""Of a rank of a job that failed on its own.

srun reports the highest exit status of all ranks. EXIT_FAILED must therefore exceed EXIT_RESUMABLE, the exit status of
ranks that were stopped because another rank failed.
"""


def get_exit_status(code: str | int | None) -> int:
    """Return the status with which a process exits after `sys.exit(code)`."""
    if isinstance(code, int):
        return code & 0xFF  # the kernel keeps the lowest byte
    return 0 if code is None else 1


@contextlib.contextmanager
def ignore_successful_exit() -> Iterator[None]:
    """Continue after the `with` block if the block calls `sys.exit` with status 0."""
    try:
        yield
    except SystemExit as end:
        if get_exit_status(end.code) != 0:
            raise
