"""Control groups with small limits, for tests of limits that the kernel enforces."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

CGROUP_ROOT = Path("/sys/fs/cgroup")
REMOVAL_SECONDS = 10
UNAVAILABLE_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)


@contextlib.contextmanager
def create_control_group(
    controller: str, limits: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """Create a control group with limits, and remove it afterward.

    `limits` and `optional` map the names of files to their text. The test is skipped if this process cannot create the
    group or write a file of `limits`. Files of `optional` are skipped if they cannot be written.
    """
    version_1_root = CGROUP_ROOT / controller
    root = version_1_root if version_1_root.is_dir() else CGROUP_ROOT
    group = root / f"test-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        make_group_or_skip(group, limits)
        for name, text in (optional or {}).items():
            with contextlib.suppress(OSError):
                (group / name).write_text(text)
        yield group
    finally:
        remove_control_group(group)


def make_group_or_skip(group: Path, limits: Mapping[str, str]) -> None:
    """Create a control group with limits, or skip the test if the kernel or the user's rights forbid it."""
    try:
        group.mkdir()
        for name, text in limits.items():
            (group / name).write_text(text)
    except OSError as error:
        if error.errno not in UNAVAILABLE_ERRORS:
            raise
        pytest.skip(f"cannot create a control group: {error}")


def remove_control_group(group: Path) -> None:
    """Remove a control group as soon as its processes have exited."""
    deadline = time.monotonic() + REMOVAL_SECONDS
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
