"""User-facing errors and exit statuses. Imports no library, so that every command may start with it."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator

from common import exit_on_interrupt
from common.core import process_limits

DIVERGENCE = "the loss of step|no finite number"  # pattern in the error of a run whose training diverged
NO_VALID_CHECKPOINT = "no valid checkpoint left"  # in the error of a run none of whose checkpoints is valid
SOURCE_ERROR = (  # in the reason of a run that failed through its source, not a device or the network
    r"failed(?: first)?: (?:after step \d+: )?"
    r"(?:(?:Assertion|Attribute|Index|Key|Name|NotImplemented|Recursion|Type|UnboundLocal|Value|ZeroDivision)Error\b"
    r"|RuntimeError: (?!.*(?:CUDA|NCCL|gloo|[Cc]onnection|peer|[Tt]imed out|new thread|temporarily unavailable)))"
)
EXIT_REFUSED = 2  # exit status after a UserError
EXIT_RESUMABLE = 75  # exit status after a stop request: saved, resumable (EX_TEMPFAIL of sysexits.h)


class UserError(Exception):
    """A mistake of the user or of the machine: one message that names the remedy, no traceback."""


class Unreachable(UserError):
    """A rank or host that does not answer. On a cluster another attempt may get another host."""


class MachineError(RuntimeError):
    """A fault of the machine that another attempt may be spared: one message that names the remedy, no traceback."""


def explain_error(error: BaseException) -> BaseException:
    """Return a MachineError for an error that comes from a limit of the machine, and any other error as it is."""
    is_known = isinstance(error, MachineError) or not process_limits.is_shortage(error)
    return error if is_known else MachineError(process_limits.describe_shortage())


class RunTaken(UserError):
    """An attempt that must not train: another one has the run, or its folder is gone. It leaves the result alone."""


def summarize_error(error: BaseException) -> str:
    """Return an error in one line: the system's message and the file of an OSError, else the first line of its text."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_timeout(error: BaseException) -> bool:
    """Check whether a collective or a message exceeded its time limit.

    gloo reports it in two ways: for the operation that waited ("Timed out waiting ..."), and for those behind it on the
    same connection ("Application timeout caused pair closure").
    """
    if isinstance(error, MachineError):  # which may name a setting such as launch.step_timeout
        return False
    return isinstance(error, TimeoutError) or bool(re.search("timed out|timeout", str(error), re.IGNORECASE))


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a UserError into one line on stderr and exit status 2, a MachineError into 1, Ctrl-C into 130."""
    if signal.getsignal(signal.SIGINT) is exit_on_interrupt:  # all is imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except UserError as error:
        with contextlib.suppress(OSError):  # a log may be on a full disk
            print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    except (RuntimeError, OSError) as error:
        known = explain_error(error)
        if not isinstance(known, MachineError):
            raise
        with contextlib.suppress(OSError):
            print(f"error: {known}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
