"""Standard output and standard error that discard text which cannot be written.

Without this module, `... | head -1` would end a run when `head` exits, and `... > FILE` when the disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from common.system.errors import UserError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class DiscardingFile(io.FileIO):
    """File that discards data which cannot be written.

    The reader of the file has exited or, if the file is non-blocking, is too slow; or the disk is full.
    """

    def __init__(self, descriptor: int, *, warns: bool) -> None:
        """Open a file descriptor. If `warns` is True, print one warning on standard error about discarded data."""
        super().__init__(descriptor, "w", closefd=False)
        self.warns = warns

    def write(self, data: ReadableBuffer, /) -> int:
        """Write data, and return the number of bytes that were written or discarded."""
        try:
            written: int | None = super().write(data)
        except OSError as error:
            self._warn_once(str(error.strerror))
            written = memoryview(data).nbytes
        if written is None:  # the file is non-blocking
            self._warn_once("its reader is too slow")
            written = memoryview(data).nbytes
        return written

    def _warn_once(self, reason: str) -> None:
        if not self.warns:
            return
        self.warns = False
        text = f"WARNING: cannot write standard output ({reason}); the run continues, see its run folder"
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def discard_unwritable_output() -> None:
    """Let this process continue when its standard output or standard error cannot be written."""
    sys.stdout = replace_stream(sys.stdout, warns=True)
    sys.stderr = replace_stream(sys.stderr, warns=False)


def replace_stream(stream: TextIO | None, *, warns: bool) -> TextIO:
    """Return a stream that writes to the same file as a standard stream, and discards what cannot be written.

    `stream` is None if the file was closed before Python started. A stream without a file is returned unchanged.
    """
    if stream is None:
        return open(os.devnull, "w")
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # for example, an io.StringIO
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    file = DiscardingFile(descriptor, warns=warns)
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )


def discard_standard_output() -> None:
    """Discard what standard output still buffers and what is printed later, so that the flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def explain_full_output() -> Iterator[None]:
    """Raise UserError if standard output is redirected to a file on a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        discard_standard_output()
        raise UserError(
            f"cannot write standard output ({error.strerror}); free disk space, or redirect the output to another file"
        ) from None
