"""Run folders made by older versions of this project: a finished run, and a run stopped after step 22 of 60.

Each contains the source that made it in its `code/`. `november_2026` was made before most names in the code changed.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from common.runs.folder import RunFolder

VERSIONS = ("november_2026",)


def unpack(version: str, folder: Path) -> tuple[RunFolder, RunFolder]:
    """The stopped and the finished run of a version, below `folder`/runs."""
    with tarfile.open(Path(__file__).parent / f"{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    stopped, finished = (RunFolder(path) for path in sorted((folder / "runs").iterdir()))
    return stopped, finished
