"""A file whose checksum is taken while it is written, past the page cache where the disk lets us. Knows no torch."""

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
    """A file for torch.save: what is given is copied into pieces, which one thread writes and another one hashes.

    Written directly from these pieces to the disk, a file needs no new memory for each of its pages: that memory
    would have to be found while training waits, for content that nobody reads again. Pieces lie and end as direct
    writes want them; what the last one has too much is cut off. Where the disk refuses, writes are ordinary ones.
    """

    def __init__(self, file: io.FileIO) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None
        self.pieces = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(CHUNKS)]
        self.busy: list[list[Future[Any]]] = [[] for _ in self.pieces]
        self.turn = self.filled = 0
        self.writer, self.hasher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def __enter__(self) -> HashingWriter:
        self._go(O_DIRECT)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """All of it is written, but not yet brought to the disk."""
        with self.writer, self.hasher:
            if kind is None:
                self._pass_on()
                for turn in range(CHUNKS):
                    self._wait(turn)
        if kind is None and self.error is None:
            try:
                self.file.truncate(self.size)
            except OSError as error:
                self.error = error

    def write(self, data: memoryview) -> int:
        """After an error it only pretends: torch must not be left in the middle of a file."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        while self.error is None and rest:
            count = min(len(rest), CHUNK_BYTES - self.filled)
            self.pieces[self.turn][self.filled : self.filled + count] = rest[:count]
            rest, self.filled, self.size = rest[count:], self.filled + count, self.size + count
            if self.filled == CHUNK_BYTES:
                self._pass_on()
        return length

    def flush(self) -> None:
        """Nothing is held back for long."""

    def _pass_on(self) -> None:
        """Have the piece written and hashed, and take the next one when it is free."""
        whole = -(-self.filled // mmap.PAGESIZE) * mmap.PAGESIZE
        view = memoryview(self.pieces[self.turn])
        self.busy[self.turn] = [
            self.writer.submit(self._write, view[:whole]),
            self.hasher.submit(self.digest.update, view[: self.filled]),
        ]
        self.turn, self.filled = (self.turn + 1) % CHUNKS, 0
        self._wait(self.turn)

    def _wait(self, turn: int) -> None:
        for work in self.busy[turn]:
            try:
                work.result()
            except OSError as error:
                self.error = self.error or error
        self.busy[turn] = []

    def _write(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[os.write(self.file.fileno(), rest) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._go(0):
                    raise

    def _go(self, direct: int) -> bool:
        """Write directly or not; returns whether that is a change."""
        handle = self.file.fileno()
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        wanted = flags & ~O_DIRECT | direct
        with contextlib.suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_SETFL, wanted)
        return fcntl.fcntl(handle, fcntl.F_GETFL) != flags
