"""Run folders that older versions of this project made: one finished run, and one that was stopped after step 22 of 60.

Each has the source it was made with in its `code/`. `one_folder` is of a version whose `common` and `slurm` had no
packages and which kept no model; `one_launcher_folder` of one whose `slurm` had none.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from common.runs.folder import Folder

VERSIONS = ("one_folder", "one_launcher_folder")


def unpack(version: str, folder: Path) -> tuple[Folder, Folder]:
    """The stopped and the finished run of a version, below `folder`/runs."""
    with tarfile.open(Path(__file__).parent / f"{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    stopped, finished = (Folder(path) for path in sorted((folder / "runs").iterdir()))
    return stopped, finished
