"""Log of one rank's failures."""

from __future__ import annotations

import logging
import time

from common.runs.failures import Failure, describe_error, join_first_and_last_line, write_failure
from common.runs.folder import RunFolder
from common.system import foreign_text
from common.system.causes import Cause
from common.system.errors import MachineError, UserError


class FailureLog:
    """Log of one rank's failures, the first of which is recorded in the attempt's folder."""

    def __init__(self, attempt: RunFolder, rank: int, logger: logging.Logger) -> None:
        self.attempt = attempt
        self.rank = rank
        self.logger = logger
        self.has_record = False

    def log_failure(self, step: int, error: BaseException | str) -> None:
        """Log a failure after the completed step `step`.

        A string names the ranks that did not respond. The log contains a traceback unless the error is a string, a
        UserError, or a MachineError.
        """
        text = error if isinstance(error, str) else describe_error(error)
        trace = None if isinstance(error, str | UserError | MachineError) else error
        self.logger.error("after step %d: %s", step, text, exc_info=trace)
        if self.has_record:  # the first failure is the cause of later failures
            return
        self.has_record = True
        cause = Cause.SILENT_RANK if isinstance(error, str) else foreign_text.classify_error(error)
        message = f"after step {step}: {join_first_and_last_line(text)}"
        write_failure(self.attempt, self.rank, Failure(cause, message, time.time()))
