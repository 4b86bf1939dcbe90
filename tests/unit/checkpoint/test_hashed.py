"""A file that is hashed while it is written holds what was given, whatever its size and its disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import random
from pathlib import Path

import pytest

from common.checkpoint.hashing_writer import CHUNK_BYTES, CHUNKS, O_DIRECT, HashingWriter

SIZES = [
    0,
    1,
    mmap.PAGESIZE,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
    CHUNK_BYTES + 1,
    CHUNKS * CHUNK_BYTES,
    (CHUNKS + 2) * CHUNK_BYTES + 12345,
]


def write(path: Path, content: bytes) -> HashingWriter:
    """In parts of many sizes, as torch does it."""
    rest, chance = memoryview(content), random.Random(0)
    with open(path, "xb", buffering=0) as file:
        with HashingWriter(file) as it:
            while rest:
                count = min(len(rest), chance.choice([1, 64, 5000, CHUNK_BYTES // 2, 3 * CHUNK_BYTES]))
                assert it.write(rest[:count]) == count
                rest = rest[count:]
        assert it.error is None
    return it


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("folder", ["disk", "memory"])
def test_the_file_and_its_checksum_are_those_of_the_content(size: int, folder: str, tmp_path: Path) -> None:
    path = tmp_path / "file" if folder == "disk" else Path("/dev/shm") / f"hashed-{os.getpid()}"
    content = random.Random(size).randbytes(size)
    try:
        it = write(path, content)
        assert path.read_bytes() == content and it.size == size
        assert it.digest.hexdigest() == hashlib.sha256(content).hexdigest()
    finally:
        path.unlink(missing_ok=True)


def test_a_disk_that_refuses_direct_writes_gets_ordinary_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 1)  # so that the last write has a length that none can take directly
    with open(tmp_path / "probe", "xb", buffering=0) as file:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | O_DIRECT)
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
            os.write(file.fileno(), b"odd")
    content = random.Random(1).randbytes(2 * CHUNK_BYTES + 777)
    write(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content


def test_after_an_error_it_pretends_and_tells(tmp_path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as file, HashingWriter(file) as it:
        for _ in range(CHUNKS + 2):
            assert it.write(memoryview(bytes(CHUNK_BYTES))) == CHUNK_BYTES
    assert it.error is not None and it.error.errno == errno.ENOSPC
