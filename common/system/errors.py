"""User-facing errors and exit statuses. This module imports no third-party library, so all commands can import it."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator

from common import exit_on_interrupt
from common.system import process_limits

# matches the error of a run that diverged; the second alternative occurs only in old run folders
DIVERGENCE_PATTERN = "the loss of step|no finite.number|contains? NaN|NaN or infinity|(?:is|are) not finite"
NO_VALID_CHECKPOINT_TEXT = "no valid checkpoint left"  # part of the error of a run without a valid checkpoint
# matches the failure reason of a run if its source code, and not a device or the network, caused the failure
SOURCE_ERROR_PATTERN = (
    r"failed(?: first)?: (?:after step \d+: )?"
    r"(?:(?:Assertion|Attribute|Index|Key|Name|NotImplemented|Recursion|Type|UnboundLocal|Value|ZeroDivision)Error\b"
    r"|RuntimeError: (?!.*(?:CUDA|NCCL|gloo|[Cc]onnection|peer|[Tt]imed out|new thread|temporarily unavailable)))"
)
EXIT_REFUSED = 2  # exit status after a UserError
EXIT_RESUMABLE = 75  # exit status of a resumable run after a stop request (EX_TEMPFAIL in sysexits.h)


class UserError(Exception):
    """An error with a remedy for the user, shown as one message without a traceback."""


class UnreachableError(UserError):
    """Error of a rank or host that does not respond. On a cluster, another attempt may run on a different host."""


class MachineError(RuntimeError):
    """A machine failure that another attempt may avoid, shown as one message without a traceback."""


def convert_shortage_error(error: BaseException) -> BaseException:
    """Convert an error caused by a limit of the machine to a MachineError. Return other errors unchanged."""
    if isinstance(error, MachineError) or not process_limits.is_thread_shortage(error):
        return error
    return MachineError(process_limits.describe_thread_shortage())


class RunTakenError(UserError):
    """An error that prevents an attempt from training and from writing a result.

    Another attempt has taken over the run, or the folder of the attempt was deleted.
    """


def summarize_error(error: BaseException) -> str:
    """Return a one-line summary of an error.

    The summary of an OSError is its message and file. The summary of any other error is the first line of its message.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def is_timeout(error: BaseException) -> bool:
    """Return whether an error means that a collective or a message exceeded its time limit.

    gloo reports a timeout in two ways: "Timed out waiting ..." for the operation that waited, and "Application timeout
    caused pair closure" for operations that were queued behind it on the same connection.
    """
    if isinstance(error, MachineError):  # the message may contain the word timeout, as in launch.step_timeout
        return False
    return isinstance(error, TimeoutError) or bool(re.search("timed out|timeout", str(error), re.IGNORECASE))


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
