"""A file writer that hashes the data it writes, and bypasses the page cache if possible.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

CHUNK_BYTES = 4 << 20  # bytes that are hashed and written in one operation
CHUNKS = 3  # one chunk is filled while the other two are written and hashed
O_DIRECT = getattr(os, "O_DIRECT", 0)  # exists on Linux only


class HashingWriter:
    """A file object for torch.save that hashes the data while writing the data to a file.

    The data is copied into chunks. One thread writes the chunks to the file, and another thread hashes them.

    Chunks are written directly to the disk (O_DIRECT), without the page cache. The page cache has no benefit, because
    the file is not read again, and training would have to wait while the kernel frees memory for the cache. The size of
    a direct write must be a multiple of the page size. Therefore, the last chunk is padded, and the padding is removed
    from the file at the end. If the disk does not support direct writes, ordinary writes are used instead.
    """

    def __init__(self, file: io.FileIO) -> None:
        self.file = file
        self.size = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None
        """The first error that occurred while writing, or None. The caller must raise this error."""
        self.chunks = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(CHUNKS)]
        self.pending: list[list[Future[Any]]] = [[] for _ in self.chunks]
        self.index = 0
        self.filled = 0
        self.writer = ThreadPoolExecutor(1)
        self.hasher = ThreadPoolExecutor(1)

    def __enter__(self) -> HashingWriter:
        self._set_direct_writes(O_DIRECT)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the last chunks. The caller must then flush the file to the disk with os.fsync."""
        with self.writer, self.hasher:
            if kind is None:
                self._submit_chunk()
                for index in range(CHUNKS):
                    self._wait_for_chunk(index)
        if kind is None and self.error is None:
            try:
                self.file.truncate(self.size)
            except OSError as error:
                self.error = error

    def write(self, data: memoryview) -> int:
        """Append data to the file and return its size in bytes.

        After a write error, further data is ignored, because torch.save cannot be stopped in the middle of a file.
        """
        remaining = memoryview(data).cast("B")
        length = len(remaining)
        while self.error is None and remaining:
            count = min(len(remaining), CHUNK_BYTES - self.filled)
            self.chunks[self.index][self.filled : self.filled + count] = remaining[:count]
            remaining = remaining[count:]
            self.filled += count
            self.size += count
            if self.filled == CHUNK_BYTES:
                self._submit_chunk()
        return length

    def flush(self) -> None:
        """Do nothing. torch.save requires this method."""

    def _submit_chunk(self) -> None:
        """Submit the current chunk for writing and hashing, and wait until the next chunk is free."""
        padded = -(-self.filled // mmap.PAGESIZE) * mmap.PAGESIZE  # rounded up to whole pages
        view = memoryview(self.chunks[self.index])
        writing = self.writer.submit(self._write_chunk, view[:padded])
        hashing = self.hasher.submit(self.digest.update, view[: self.filled])
        self.pending[self.index] = [writing, hashing]
        self.index = (self.index + 1) % CHUNKS
        self.filled = 0
        self._wait_for_chunk(self.index)

    def _wait_for_chunk(self, index: int) -> None:
        """Wait until a chunk has been written and hashed, and store the first error in `error`."""
        for future in self.pending[index]:
            try:
                future.result()
            except OSError as error:
                self.error = self.error or error
        self.pending[index] = []

    def _write_chunk(self, remaining: memoryview) -> None:
        """Write a chunk to the file. Use ordinary writes if the disk does not support direct writes."""
        while remaining:
            try:
                remaining = remaining[os.write(self.file.fileno(), remaining) :]
            except OSError as error:
                # EINVAL: the disk does not support direct writes. Disable direct writes and repeat the write.
                if error.errno != errno.EINVAL or not self._set_direct_writes(0):
                    raise

    def _set_direct_writes(self, direct: int) -> bool:
        """Enable direct writes if `direct` is O_DIRECT; disable direct writes if `direct` is 0.

        Returns True if the status flags of the file have changed.
        """
        fd = self.file.fileno()
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~O_DIRECT | direct)
        return fcntl.fcntl(fd, fcntl.F_GETFL) != flags
