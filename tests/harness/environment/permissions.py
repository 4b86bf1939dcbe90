"""Enforce file permissions also for root, which can otherwise read every file."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of linux/capability.h
PERMISSION_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def enforce_permissions() -> Iterator[None]:
    """Make the kernel check the permissions of files that this thread opens in the `with` block."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable capabilities, in two groups of 32
    if libc.capget(header, before):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    reduced = (ctypes.c_uint32 * 6)(*before)
    reduced[0] &= ~PERMISSION_OVERRIDES
    if libc.capset(header, reduced):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        libc.capset(header, before)
