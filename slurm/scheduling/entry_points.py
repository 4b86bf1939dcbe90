"""Names under which the commands call into a run's own source.

A run executes the copy of the source in its folder, `code/`, which may be older than the command that resumes or
repeats it. The source carries the version of these names in `slurm/entry_points.json`; a copy without that file has
version 1.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
from typing import Any

from common.core.errors import UserError
from common.runs.folder import Folder, read_json


@dataclasses.dataclass(frozen=True)
class EntryPoints:
    """The modules of one version of the source."""

    job: str
    """Has the class Job, which SLURM's tasks execute."""
    requeue: str
    """Executed by the job script after the tasks, with the run folder and their exit status."""
    submit: tuple[str, ...]
    """Words after `python -m` that check the settings of an experiment."""
    elastic: str = ""
    """Starts the ranks of an elastic run, with the run folder and the command of srun; empty where there are none."""
    separator: str = ""
    """What stands in that command between the options of srun and what a rank executes."""


VERSIONS = {
    1: EntryPoints("slurm.job", "slurm.after", ("slurm.submit",)),
    2: EntryPoints("slurm.scheduling.job", "slurm.scheduling.requeue", ("slurm", "exp")),
    3: EntryPoints(
        "slurm.scheduling.job", "slurm.scheduling.requeue", ("slurm", "exp"), "slurm.scheduling.elastic_launcher"
    ),
}
VERSIONS[4] = dataclasses.replace(VERSIONS[3], separator="--")
CURRENT = VERSIONS[4]


def find_entry_points(folder: Folder) -> EntryPoints:
    """Find the entry points of a run's own source. Raises UserError for a version that is not known here."""
    version = read_json(folder.path / "code" / "slurm" / "entry_points.json").get("version", 1)
    if version not in VERSIONS:
        raise UserError(f"{folder.path} was made by a newer version of this project; use that version for it")
    return VERSIONS[version]


class ModuleReference:
    """Unpickled as the module of that name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.name,)


class JobReference:
    """Unpickled as `Job(folder)` of the source that is on the path there, which need not have this class."""

    def __init__(self, module: str, folder: str) -> None:
        self.module, self.folder = module, folder

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("Job", self.folder), (ModuleReference(self.module),)
