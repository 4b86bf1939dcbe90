"""Names of modules that commands and job scripts execute from a run's copy of the source code.

A run executes the copy of the source code in `code/` of the run folder. A command that resumes or repeats the run may
belong to a different version of the project. The file `slurm/entry_points.json` in the copy contains the version of
these names. A change that moves Job, requeue, elastic_launcher or the verb `exp` needs a new version.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

from common.runs.folder import RunFolder, read_json
from common.system.errors import UserError

VERSION = 4
JOB_MODULE = "slurm.scheduling.job"
"""Module that defines the class Job, which each SLURM task of a job executes."""
REQUEUE_MODULE = "slurm.scheduling.requeue"
"""Module that the job script executes after its tasks. Its arguments are the run folder and the exit status."""
ELASTIC_LAUNCHER_MODULE = "slurm.scheduling.elastic_launcher"
"""Module that starts the ranks of an elastic run. Its arguments are the run folder and the srun command."""
CHECK_COMMAND = ("slurm", "exp")
"""Arguments of `python -m` for checking the settings of an experiment."""


def check_source_version(folder: RunFolder) -> None:
    """Raise UserError if the run's copy of the source code has a different version of the entry points."""
    if read_json(folder.path / "code" / "slurm" / "entry_points.json").get("version") != VERSION:
        raise UserError(
            f"{folder.path} was created by another version of this project; use that version, or start a new run"
        )


class ModuleReference:
    """Reference to a module by its name. Unpickling the reference imports and returns the module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.name,)


class JobReference:
    """Reference to a run folder. Unpickling the reference returns `Job(folder)`.

    `Job` is imported from the source code that the unpickling process uses. That code need not define JobReference.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("Job", self.folder), (ModuleReference(JOB_MODULE),)
