"""User-facing errors and exit statuses. Imports no library, so that every command may start with it."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator

from common import exit_on_interrupt

DIVERGENCE = "the loss of step|no finite number"  # pattern in the error of a run whose training diverged
NO_VALID_CHECKPOINT = "can be used, as told above"  # in the error of a run none of whose checkpoints is valid
SOURCE_ERROR = (  # in the reason of a run that failed through its source, not a device or the network
    r"failed(?: first)?: (?:after step \d+: )?"
    r"(?:(?:Assertion|Attribute|Index|Key|Name|NotImplemented|Recursion|Type|UnboundLocal|Value|ZeroDivision)Error\b"
    r"|RuntimeError: (?!.*(?:CUDA|NCCL|gloo|[Cc]onnection|peer|[Tt]imed out|DataLoader worker)))"
)
EXIT_RESUMABLE = 75  # exit status after a stop request: saved, resumable (EX_TEMPFAIL of sysexits.h)


class UserError(Exception):
    """A mistake of the user or of the machine: one message that names the remedy, no traceback."""


class Unreachable(UserError):
    """A rank or host that does not answer. On a cluster another attempt may get another host."""


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
    return isinstance(error, TimeoutError) or bool(re.search("timed out|timeout", str(error), re.IGNORECASE))


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a UserError into one line on stderr and exit status 2, and Ctrl-C into one line and status 130."""
    if signal.getsignal(signal.SIGINT) is exit_on_interrupt:  # all is imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except UserError as error:
        with contextlib.suppress(OSError):  # a log may be on a full disk
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
