"""Calls in a forked process, so that decoding or downloading data does not affect the process that trains."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from common.system import foreign_text
from common.system.causes import PEER_CAUSES, Cause
from common.system.errors import UserError
from common.system.processes import kill_with_parent

EXIT_TIMEOUT = 5.0  # seconds to wait for a subprocess to exit after it has sent its result


def call_in_subprocess(
    function: Callable[..., Any],
    *arguments: Any,
    limit: float = 600,
    show: Callable[[int, int], None] | None = None,
) -> Any:
    """Call a function in a forked process and return its value.

    Modules that the function imports and threads that the function starts do not affect this process. If `show` is
    given, the function receives an additional argument: a function `report_progress(done, total)`, which calls `show`
    with the same arguments in this process. Raises UserError if the function fails or takes longer than `limit`
    seconds.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)  # each message is a tuple (kind, content)

    def report_progress(done: int, total: int) -> None:
        sender.send(("progress", (done, total)))

    def call_and_send_result() -> None:
        """Call the function, send its value or its error to the parent process, and exit."""
        kill_with_parent()
        reporters = () if show is None else (report_progress,)
        try:
            sender.send(("value", function(*arguments, *reporters)))
        except UserError as error:
            sender.send(("error", (str(error), error.cause)))
        except BaseException as error:  # noqa: BLE001 (the parent reports the error)
            text = f"{function.__name__} failed: {type(error).__name__}: {error}"
            sender.send(("error", (text, classify_data_error(error))))
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)

    process = context.Process(target=call_and_send_result)
    process.start()
    sender.close()
    deadline = time.monotonic() + limit
    try:
        kind = "progress"
        while kind == "progress":
            if not receiver.poll(max(0, deadline - time.monotonic())):
                raise UserError(f"{function.__name__} took longer than {limit:.0f} s")
            kind, content = receiver.recv()
            if kind == "progress" and show is not None:
                show(*content)
        process.join(EXIT_TIMEOUT)
    except EOFError:
        process.join(EXIT_TIMEOUT)
        raise make_exit_error(function.__name__, process.exitcode) from None
    finally:
        process.kill()
        process.join()
    if kind == "error":
        text, cause = content
        raise UserError(text, cause=cause)
    return content


def make_exit_error(name: str, exit_code: int | None) -> UserError:
    """Return the error of a process that has exited without returning the result of the function `name`."""
    if exit_code == -signal.SIGKILL:
        problem = f"{name} was killed; the machine may have run out of memory; use less data"
        return UserError(problem, cause=Cause.OUT_OF_MEMORY)
    return UserError(f"{name} exited without returning a result")


def classify_data_error(error: BaseException) -> Cause:
    """Return the cause of an error that occurred while a library read, downloaded or generated data."""
    cause = foreign_text.classify_error(error)
    # A library that reads damaged files may raise a ValueError. A download does not communicate with other ranks.
    return Cause.OTHER if cause is Cause.SOURCE_ERROR or cause in PEER_CAUSES else cause
