"""Descriptions of disk problems, each with a remedy."""

from __future__ import annotations

import errno

from common.system.causes import Cause

DISK_PROBLEMS = {
    Cause.DISK_FULL: "the disk is full; free up space",
    Cause.DISK_READ_ONLY: "the disk is read-only; choose another folder",
    Cause.FILE_TOO_LARGE: "the file would exceed the size limit (ulimit -f); raise the limit",
}
"""Description and remedy of each disk problem that has a cause."""

DISK_ERRORS = {
    errno.ENOSPC: DISK_PROBLEMS[Cause.DISK_FULL],
    errno.EDQUOT: "the disk quota is exhausted; free up space",
    errno.EFBIG: DISK_PROBLEMS[Cause.FILE_TOO_LARGE],
    errno.EROFS: DISK_PROBLEMS[Cause.DISK_READ_ONLY],
    errno.EACCES: "no permission to write; choose another folder",
    errno.EPERM: "no permission to write; choose another folder",
    errno.ENOENT: "the folder does not exist or was deleted; choose another folder",
    errno.ENOTDIR: "part of the path is a file; choose another folder",
    errno.ENAMETOOLONG: "a name in the path is too long; choose another folder",
}
"""Description and remedy of each error of the operating system that a user can fix, by error number."""
