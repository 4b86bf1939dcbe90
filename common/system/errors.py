"""User-facing errors and exit statuses. This module imports no third-party library, so all commands can import it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from common import exit_on_interrupt
from common.system import foreign_text, process_limits
from common.system.causes import Cause
from common.system.exit_status import EXIT_REFUSED


class CausedError(Exception):
    """Base class of errors with a known cause."""

    cause = Cause.OTHER

    def __init__(self, *args: object, cause: Cause | None = None) -> None:
        """Create an error. If `cause` is None, the error has the cause of its class."""
        super().__init__(*args)
        if cause is not None:
            self.cause = cause


class UserError(CausedError):
    """An error with a remedy for the user, shown as one message without a traceback."""


class UnreachableError(UserError):
    """Error of a rank or host that does not respond. On a cluster, another attempt may run on a different host."""

    cause = Cause.UNREACHABLE


class MachineError(CausedError, RuntimeError):
    """A machine failure that another attempt may avoid, shown as one message without a traceback."""


class CausedDiskError(CausedError, OSError):
    """A disk error that another rank has reported."""


class RankTimeoutError(CausedError, TimeoutError):
    """A collective or a message between ranks that exceeded its time limit."""

    cause = Cause.TIMEOUT


class CausedRuntimeError(CausedError, RuntimeError):
    """An error with a known cause that is shown with a traceback."""


def convert_shortage_error(error: BaseException) -> BaseException:
    """Convert an error caused by a limit of the machine to a MachineError. Return other errors unchanged."""
    if isinstance(error, MachineError):
        return error
    if foreign_text.is_thread_shortage(error):
        return MachineError(process_limits.describe_thread_shortage(), cause=Cause.THREAD_SHORTAGE)
    if foreign_text.is_file_shortage(error):
        return MachineError(process_limits.describe_file_shortage())
    return error


class RunTakenError(UserError):
    """An error that prevents an attempt from training and from writing a result.

    Another attempt has taken over the run, or the folder of the attempt was deleted.
    """

    cause = Cause.RUN_TAKEN


def summarize_error(error: BaseException) -> str:
    """Return a one-line summary of an error.

    The summary of an OSError is its message and file. The summary of any other error is the first line of its message.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Print a UserError or MachineError without a traceback on stderr, and exit.

    The exit status is 2 for a UserError, 1 for a MachineError, and 130 for Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is exit_on_interrupt:  # the imports are complete
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except UserError as error:
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    except (RuntimeError, OSError) as error:
        explained = convert_shortage_error(error)
        if not isinstance(explained, MachineError):
            raise
        with contextlib.suppress(OSError):
            print(f"error: {explained}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
