"""Errors about a shortage of files, sockets or threads name the limit that was reached."""

from __future__ import annotations

import errno
import os
import resource
import socket

import pytest

from common.system.errors import convert_shortage_error

FILE_SHORTAGES = [
    OSError(errno.EMFILE, os.strerror(errno.EMFILE), "metrics.jsonl"),
    RuntimeError("[enforce fail at gloo/transport/tcp/socket.cc:24] socket: Too many open files"),
]


@pytest.mark.parametrize("error", FILE_SHORTAGES)
def test_a_shortage_of_files_is_reported_with_limit_and_remedy(error: Exception) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = str(convert_shortage_error(error))
    assert f"ulimit -n is {limit}; raise that limit, or lower data.workers" in message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a bug"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        ValueError("temporarily"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.EAGAIN, "mlock"),
        RuntimeError("TCPStore: recv failed: Resource temporarily unavailable"),
    ],
    ids=str,
)
def test_other_errors_are_not_converted(error: Exception) -> None:
    assert convert_shortage_error(error) is error


def test_the_error_of_a_socket_that_would_block_is_not_converted() -> None:
    first, second = socket.socketpair()
    with first, second:
        first.setblocking(False)
        with pytest.raises(BlockingIOError) as caught:
            first.recv(1)
    assert convert_shortage_error(caught.value) is caught.value
