"""Exit statuses of runs and commands."""

EXIT_REFUSED = 2
"""After a UserError, such as an invalid setting."""
EXIT_RESUMABLE = 75
"""After a stop request: the run can be resumed (EX_TEMPFAIL in sysexits.h)."""
EXIT_FAILED = 76
"""Of a rank of a job that failed on its own.

srun reports the highest exit status of all ranks. EXIT_FAILED must therefore exceed EXIT_RESUMABLE, the exit status of
ranks that were stopped because another rank failed.
"""
