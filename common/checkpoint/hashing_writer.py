"""A file whose checksum is taken while it is written, past the page cache where the disk allows it. Without torch."""

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

CHUNK_BYTES = 4 << 20  # bytes that are hashed and written at once
CHUNKS = 3  # one is filled while another is written and hashed
O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it


class HashingWriter:
    """A file for torch.save: data is copied into chunks, which one thread writes and another one hashes.

    Direct writes (O_DIRECT) from these chunks need no page cache, whose memory would have to be found while training
    waits, for content that nobody reads again. They need chunks of whole pages, so the file is truncated at the end.
    Where the disk refuses, writes are ordinary ones.
    """

    def __init__(self, file: io.FileIO) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None
        self.chunks = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(CHUNKS)]
        self.busy: list[list[Future[Any]]] = [[] for _ in self.chunks]
        self.index = self.filled = 0
        self.writer, self.hasher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def __enter__(self) -> HashingWriter:
        self._set_direct(O_DIRECT)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the rest; the caller brings it to the disk (fsync), and raises `error` if there is one."""
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
        """Add data; after an error it is ignored, because torch cannot be stopped in the middle of a file."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        while self.error is None and rest:
            count = min(len(rest), CHUNK_BYTES - self.filled)
            self.chunks[self.index][self.filled : self.filled + count] = rest[:count]
            rest, self.filled, self.size = rest[count:], self.filled + count, self.size + count
            if self.filled == CHUNK_BYTES:
                self._submit_chunk()
        return length

    def flush(self) -> None:
        """Do nothing; torch.save calls it."""

    def _submit_chunk(self) -> None:
        """Have the chunk written and hashed, and take the next one when it is free."""
        padded = -(-self.filled // mmap.PAGESIZE) * mmap.PAGESIZE
        view = memoryview(self.chunks[self.index])
        self.busy[self.index] = [
            self.writer.submit(self._write, view[:padded]),
            self.hasher.submit(self.digest.update, view[: self.filled]),
        ]
        self.index, self.filled = (self.index + 1) % CHUNKS, 0
        self._wait_for_chunk(self.index)

    def _wait_for_chunk(self, index: int) -> None:
        for work in self.busy[index]:
            try:
                work.result()
            except OSError as error:
                self.error = self.error or error
        self.busy[index] = []

    def _write(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[os.write(self.file.fileno(), rest) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._set_direct(0):
                    raise

    def _set_direct(self, direct: int) -> bool:
        """Set or clear O_DIRECT (`direct`); return True if that is a change."""
        handle = self.file.fileno()
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        wanted = flags & ~O_DIRECT | direct
        with contextlib.suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_SETFL, wanted)
        return fcntl.fcntl(handle, fcntl.F_GETFL) != flags
