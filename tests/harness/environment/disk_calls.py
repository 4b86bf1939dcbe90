"""Record the system calls that decide which files survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def record_disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each later fsync and rename is appended, with the name of its file or folder."""
    calls: list[str] = []
    fsync = os.fsync
    rename = os.rename
    replace = os.replace

    def record_fsync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def record_rename(source: Path, target: Path) -> None:
        rename(source, target)
        calls.append(f"rename {source.name}")

    def record_replace(source: Path, target: Path) -> None:
        replace(source, target)
        calls.append(f"rename {source.name}")

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_replace)
    return calls
