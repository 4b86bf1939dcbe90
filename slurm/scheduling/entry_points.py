"""Names by which the commands call into the source of a run.

A run executes the copy of the source in its folder, `code/`, which may differ from the source of the command that
resumes or repeats the run. `slurm/entry_points.json` in the copy has the version of these names.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

from common.core.errors import UserError
from common.runs.folder import RunFolder, read_json

VERSION = 4
JOB_MODULE = "slurm.scheduling.job"
"""Has the class Job, which SLURM's tasks execute."""
REQUEUE_MODULE = "slurm.scheduling.requeue"
"""Executed by the job script after its tasks, with the run folder and their exit status."""
ELASTIC_LAUNCHER_MODULE = "slurm.scheduling.elastic_launcher"
"""Starts the ranks of an elastic run, with the run folder and the command of srun."""
CHECK_COMMAND = ("slurm", "exp")
"""Words after `python -m` that check the settings of an experiment."""


def check_source_version(folder: RunFolder) -> None:
    """Raise UserError unless the source of a run has the entry points of this version."""
    if read_json(folder.path / "code" / "slurm" / "entry_points.json").get("version") != VERSION:
        raise UserError(
            f"{folder.path} was made by another version of this project; use that version, or start a new run"
        )


class ModuleReference:
    """Unpickled as the module of that name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.name,)


class JobReference:
    """Unpickled as `Job(folder)` of the source on the path, which need not have this class."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("Job", self.folder), (ModuleReference(JOB_MODULE),)
