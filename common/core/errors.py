"""User-facing errors and exit statuses. Imports no library, so that every command can use it."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator

from common import exit_on_interrupt
from common.core import process_limits

# pattern in the error of a run that diverged; old run folders contain the second alternative
DIVERGENCE_PATTERN = "the loss of step|no finite.number|contains? NaN|NaN or infinity|(?:is|are) not finite"
NO_VALID_CHECKPOINT_TEXT = "no valid checkpoint left"  # in the error of a run without a valid checkpoint
SOURCE_ERROR_PATTERN = (  # in the reason of a run that failed because of its source code, not a device or the network
    r"failed(?: first)?: (?:after step \d+: )?"
    r"(?:(?:Assertion|Attribute|Index|Key|Name|NotImplemented|Recursion|Type|UnboundLocal|Value|ZeroDivision)Error\b"
    r"|RuntimeError: (?!.*(?:CUDA|NCCL|gloo|[Cc]onnection|peer|[Tt]imed out|new thread|temporarily unavailable)))"
)
EXIT_REFUSED = 2  # exit status after a UserError
EXIT_RESUMABLE = 75  # exit status after a stop request: saved, resumable (EX_TEMPFAIL of sysexits.h)


class UserError(Exception):
    """An error with a remedy for the user, shown as one message without a traceback."""


class UnreachableError(UserError):
    """A rank or host does not answer. On a cluster another attempt may get another host."""


class MachineError(RuntimeError):
    """A failure of the machine that another attempt may avoid, shown as one message without a traceback."""


def explain_error(error: BaseException) -> BaseException:
    """Convert an error caused by a limit of the machine to a MachineError; return any other error unchanged."""
    if isinstance(error, MachineError) or not process_limits.is_shortage(error):
        return error
    return MachineError(process_limits.describe_shortage())


class RunTakenError(UserError):
    """The attempt must not train or write a result: another attempt has the run, or its folder was deleted."""


def summarize_error(error: BaseException) -> str:
    """Return an error in one line: message and file of an OSError, else the first line of its text."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def is_timeout(error: BaseException) -> bool:
    """Check whether a collective or a message exceeded its time limit.

    gloo reports it in two ways: for the operation that waited ("Timed out waiting ..."), and for operations queued
    behind it on the same connection ("Application timeout caused pair closure").
    """
    if isinstance(error, MachineError):  # its message may contain a setting such as launch.step_timeout
        return False
    return isinstance(error, TimeoutError) or bool(re.search("timed out|timeout", str(error), re.IGNORECASE))


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Exit with one line on stderr: status 2 for a UserError, 1 for a MachineError, 130 for Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is exit_on_interrupt:  # imports are complete
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except UserError as error:
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    except (RuntimeError, OSError) as error:
        explained = explain_error(error)
        if not isinstance(explained, MachineError):
            raise
        with contextlib.suppress(OSError):
            print(f"error: {explained}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
