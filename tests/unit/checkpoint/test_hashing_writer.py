"""Files that are hashed while they are written: content and checksum for all sizes, and failing disks."""

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


def write_file(path: Path, content: bytes) -> HashingWriter:
    """Write in parts of many sizes, as torch does."""
    unwritten = memoryview(content)
    random_sizes = random.Random(0)
    with open(path, "xb", buffering=0) as file:
        with HashingWriter(file) as writer:
            while unwritten:
                size = random_sizes.choice([1, 64, 5000, CHUNK_BYTES // 2, 3 * CHUNK_BYTES])
                part = unwritten[:size]
                assert writer.write(part) == len(part)
                unwritten = unwritten[size:]
        assert writer.error is None
    return writer


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("folder", ["disk", "memory"])
def test_size_and_checksum_are_those_of_the_written_content(size: int, folder: str, tmp_path: Path) -> None:
    path = tmp_path / "file" if folder == "disk" else Path("/dev/shm") / f"hashed-{os.getpid()}"
    content = random.Random(size).randbytes(size)
    try:
        writer = write_file(path, content)
        assert path.read_bytes() == content
        assert writer.size == size
        assert writer.digest.hexdigest() == hashlib.sha256(content).hexdigest()
    finally:
        path.unlink(missing_ok=True)


def test_a_disk_that_refuses_direct_writes_gets_ordinary_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 1)  # no disk accepts direct writes of the resulting last length
    with open(tmp_path / "probe", "xb", buffering=0) as file:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | O_DIRECT)
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
            os.write(file.fileno(), b"odd")
    content = random.Random(1).randbytes(2 * CHUNK_BYTES + 777)
    write_file(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content


def fail_writing(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Let each write fail with the next error number, and with the last one after that."""
    remaining = list(numbers)

    def fail(descriptor: int, chunk: memoryview) -> int:
        number = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fail)


def test_the_first_of_several_errors_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_writing(monkeypatch, errno.ENOSPC, errno.EIO)
    with open(tmp_path / "file", "xb", buffering=0) as file, HashingWriter(file) as writer:
        for _ in range(CHUNKS + 2):
            writer.write(memoryview(bytes(CHUNK_BYTES)))
    assert writer.error is not None
    assert writer.error.errno == errno.ENOSPC
    assert writer.size < (CHUNKS + 2) * CHUNK_BYTES, "data after the error are ignored"


def test_an_invalid_write_is_repeated_only_if_direct_writes_were_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writing(monkeypatch, errno.EINVAL)
    with open(tmp_path / "file", "xb", buffering=0) as file, HashingWriter(file) as writer:
        writer.write(memoryview(b"content"))
    assert writer.error is not None
    assert writer.error.errno == errno.EINVAL


def test_a_file_whose_padding_cannot_be_removed_has_an_error() -> None:
    """A character device accepts writes, but cannot be truncated."""
    with open("/dev/null", "wb", buffering=0) as file, HashingWriter(file) as writer:
        writer.write(memoryview(b"content"))
    assert writer.error is not None
    assert writer.error.errno == errno.EINVAL


def test_an_exception_in_the_block_is_raised_and_the_file_is_not_completed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with (
        open(file, "xb", buffering=0) as opened,
        pytest.raises(ValueError, match="of torch"),
        HashingWriter(opened) as writer,
    ):
        writer.write(memoryview(b"content"))
        raise ValueError("of torch")
    assert writer.error is None
    assert file.read_bytes() == b""


def test_an_error_is_recorded_and_later_writes_are_discarded() -> None:
    with open("/dev/full", "wb", buffering=0) as file, HashingWriter(file) as writer:
        for _ in range(CHUNKS + 2):
            assert writer.write(memoryview(bytes(CHUNK_BYTES))) == CHUNK_BYTES
    assert writer.error is not None
    assert writer.error.errno == errno.ENOSPC
