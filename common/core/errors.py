"""The error that a person can mend. Imports nothing, so that every command may start with it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator

DIVERGENCE = "the loss of step|no finite number"  # a pattern in the words of a run whose training diverged
UNUSABLE = "can be used, as told above"  # in the words of a run none of whose checkpoints is whole
EXIT_RESUMABLE = 75  # exit status: checkpointed after a stop request (EX_TEMPFAIL of sysexits.h)


class UserError(Exception):
    """A mistake of the user or of the machine: one message that names the remedy, no traceback."""


class Absent(UserError):
    """A process or host that does not answer. On a cluster it may be a fault that a later start does not meet."""


def is_timeout(error: BaseException) -> bool:
    """Whether a collective or a message did not end within its time limit.

    gloo says so in two ways: of the operation that waited ("Timed out waiting ..."), and of those behind it on the same
    connection ("Application timeout caused pair closure").
    """
    return isinstance(error, TimeoutError) or bool(re.search("timed out|timeout", str(error), re.IGNORECASE))


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a UserError into one line on stderr and exit status 2."""
    try:
        yield
    except UserError as error:
        with contextlib.suppress(OSError):  # a log on a full disk takes no words
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
