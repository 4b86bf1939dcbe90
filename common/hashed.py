"""A file whose checksum is taken while it is written. Knows no torch."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading

CHUNK = 1 << 20  # bytes that are hashed at once


class Hashed:
    """A file for torch.save whose checksum a second thread takes of what has been written.

    Hashing takes about as long as writing and waiting for the disk; both let the other go on.
    """

    def __init__(self, file: io.FileIO) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()
        self.error: OSError | None = None
        self.more, self.ended = threading.Event(), False
        self.thread = threading.Thread(target=self._hash)

    def __enter__(self) -> Hashed:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self.more.set()
        self.thread.join()

    def write(self, data: memoryview) -> int:
        """After an error it only pretends: torch must not be left in the middle of a file."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        try:
            while self.error is None and rest:
                count = self.file.write(rest) or 0
                rest, self.size = rest[count:], self.size + count
                self.more.set()
        except OSError as error:
            self.error = error
        return length

    def flush(self) -> None:
        """Nothing is held back."""

    def _hash(self) -> None:
        done, ended, buffer = 0, False, memoryview(bytearray(CHUNK))
        while not ended:
            self.more.wait()
            self.more.clear()
            ended = self.ended
            try:
                while self.error is None and done < self.size:
                    count = os.preadv(self.file.fileno(), [buffer[: self.size - done]], done)
                    if not count:
                        raise OSError(errno.EIO, "the file was cut off while it was written")
                    self.digest.update(buffer[:count])
                    done += count
            except OSError as error:
                self.error = error
