"""Make a folder read-only, as a disk is after an error."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mount_read_only(folder: Path) -> Iterator[None]:
    """Mount a folder over itself, read-only. Skip the test if this user cannot mount disks."""
    command = ["mount", "--bind", "--options", "ro", str(folder), str(folder)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"NOT CHECKED: no read-only disk can be mounted here: {getattr(error, 'stderr', error)}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
