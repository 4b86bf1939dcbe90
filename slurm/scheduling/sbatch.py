"""Job scripts: from a cluster profile to the text for sbatch, through Submitit."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor

from common.core import config
from common.core.config import ROOT
from common.core.errors import UserError
from common.runs.folder import Folder, disk_errors, write_atomic
from configs.elastic import Elastic
from configs.profile import Profile
from slurm.scheduling.entry_points import CURRENT, EntryPoints, JobReference, find_entry_points
from slurm.scheduling.scheduler import Scheduler, clean_environment

WORD = re.compile(r"[\w.,:=@/+\-\[\]%&|* ]*")
PATH = re.compile(r"[\w.,:=@/+\- ]+")


def load_profile(name: str, words: list[str]) -> Profile:
    """Load the profile configs/cluster/<name>.yaml with `cluster.key=value` words on top. Raises UserError."""
    known = sorted(path.stem for path in (ROOT / "configs" / "cluster").glob("*.yaml"))
    if name not in known:
        there = f"there are {', '.join(known)} in configs/cluster/"
        raise UserError(f"CLUSTER={name} is unknown; {there}; LAUNCH=slurm:NAME chooses a local cluster")
    return make_profile(config.read_config_file(ROOT / "configs" / "cluster" / f"{name}.yaml"), words)


def make_profile(values: Mapping[str, Any], words: list[str]) -> Profile:
    """Make a profile from its values as text, with `cluster.key=value` words on top. Raises UserError."""
    pairs = dict(word.removeprefix("cluster.").split("=", 1) for word in words)
    profile = config.build_config(Profile, [values, pairs])
    for key, value in vars(profile).items():
        lines = value if isinstance(value, list) else [str(value)]
        if any(c in line for line in lines for c in "\n\r\0"):
            raise UserError(f"cluster.{key}: line breaks are not allowed; write one command or value a line")
        if key != "setup" and not all(WORD.fullmatch(line) for line in lines):
            raise UserError(f"cluster.{key}={value}: only letters, digits and ._,:=@/+-[]%&|* are allowed")
    return profile


def make_submitit_parameters(
    profile: Profile,
    name: str,
    nodes: int,
    per_node: int,
    folder: Path,
    tasks: Path | None = None,
    entry_points: EntryPoints = CURRENT,
    elastic: Elastic | None = None,
) -> dict[str, Any]:
    """Make Submitit's parameters; empty values are left out, so that the cluster's own defaults hold.

    `tasks` is a file with the run folders of an array's tasks, one a line; else all is about `folder`.
    """
    here, setup = shlex.quote(str(folder)), list[str]()
    if tasks:
        here = '"$RUN"'
        setup = [f'RUN="$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(tasks))})"']
    asked: dict[str, Any] = {
        "job_name": name,
        "nodes": nodes + (elastic.spares if elastic else 0),
        "ntasks_per_node": per_node,
        "cpus_per_task": profile.cpus,
        "time": profile.time,
        "signal_delay_s": profile.signal_seconds,
        "stderr_to_stdout": True,
        "wckey": profile.wckey or None,
        # the job runs the source as it was submitted, and `python -m` must not look into the folder it is called in;
        # srun does not take over sbatch's processors by itself
        "setup": [*setup, f"export PYTHONPATH={here}/code PYTHONSAFEPATH=1", *profile.setup],
        # outside the step, where no rank's death reaches it
        "teardown": [f"{shlex.quote(sys.executable)} -m {entry_points.requeue} {here} $?"],
        "srun_args": [f"--kill-on-bad-exit={int(not elastic)}", f"--cpus-per-task={profile.cpus}", *profile.container],
        "additional_parameters": {"requeue" if profile.requeue else "no-requeue": True},
    }
    if elastic:  # SLURM goes on without a host
        asked["additional_parameters"]["no-kill"] = True
    if profile.memory_gb:
        asked["mem"] = f"{round(profile.memory_gb * 1024)}M"
    return asked | {key.replace("-", "_"): value for key, value in choose_host_options(profile).items()}


def choose_host_options(profile: Profile) -> dict[str, str]:
    """Return the options of sbatch and srun that choose hosts and GPUs, those that the profile sets."""
    found = {key: getattr(profile, key) for key in ("partition", "account", "qos", "constraint", "exclude")}
    if profile.gpus:
        kind = f"{profile.gpu_type}:" if profile.gpu_type else ""
        found[profile.gpus_as] = f"{'gpu:' if profile.gpus_as == 'gres' else ''}{kind}{profile.gpus}"
    return {key: value for key, value in found.items() if value}


class Executor(SlurmExecutor):
    """Submitit's executor, on a chosen SLURM, keeping the text of a job before it is submitted."""

    def __init__(self, folder: Folder, scheduler: Scheduler | None, launcher: str = "", separator: str = "") -> None:
        """`launcher` is a command, as the shell takes it, to which srun's is given.

        The separator stands behind the options of srun, for the launcher to tell them from what a rank executes.
        """
        self.run_folder, self.scheduler, self.launcher, self.separator = folder, scheduler, launcher, separator
        super().__init__(folder.path / "submit")

    @classmethod
    def affinity(cls) -> int:
        return 2  # the local cluster has srun inside, not here

    def make_job_script(self) -> str:
        """Return the exact text for sbatch."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))

    def submit_tasks(self, jobs: list[Any]) -> list[str]:
        """Submit all jobs as one array; returns the ids of its tasks.

        Submitit's own way would leave this class behind, and so the chosen SLURM.
        """
        paths = []
        for job in jobs:
            delayed = utils.DelayedSubmission(job)
            delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            paths.append(self.folder / f"{secrets.token_hex(16)}.pkl")
            delayed.dump(paths[-1])
        self.parameters["map_count"] = len(jobs)
        first: Any = self._submit_command(self._submitit_command_str)
        ids = [f"{first.job_id}_{number}" for number in range(len(jobs))]
        for job_id, path in zip(ids, paths, strict=True):
            utils.JobPaths(self.folder, job_id).move_temporary_file(path, "submitted_pickle")
        return ids

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text: str = super()._make_submission_file_text(f"{self.separator} {command}".lstrip(), uid)
        if self.launcher:
            setup, mark, commands = text.partition("\n# command\n")
            text = setup + mark + commands.replace("\nsrun ", f"\n{self.launcher} srun ", 1)
            assert f"\n{self.launcher} srun " in text
        write_atomic(self.folder / "job.sh", text)
        return text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        assert self.scheduler is not None
        return self.scheduler.build_command("sbatch", str(submission_file_path))


def make_executor(
    folder: Folder, scheduler: Scheduler | None, asked: dict[str, Any], elastic: Elastic | None = None
) -> Executor:
    """Make an executor for one run folder. Raises UserError."""
    if not PATH.fullmatch(str(folder.path)):
        raise UserError(
            f"a job script cannot hold the path {str(folder.path)!r}; set runs=<path of letters and digits>"
        )
    points = find_entry_points(folder)
    points = points if points.elastic else CURRENT  # without source it is only shown
    words = [sys.executable, "-m", points.elastic, str(folder.path)] if elastic else []
    made = Executor(folder, scheduler, shlex.join(words), points.separator if elastic else "")
    with disk_errors(made.folder):
        made.folder.mkdir(parents=True, exist_ok=True)
    made.update_parameters(**asked)
    return made


def prepare_runs_for_array(
    sweep: Path, folders: list[Folder], nodes: int, per_node: int, profile: Profile, scheduler: Scheduler, parallel: int
) -> Executor:
    """Prepare run folders, with equal entry points, for an array with a job for each; return its executor.

    `sweep` is the folder of the sweep.
    """
    for folder in folders:
        write_settings_and_retire_result(folder, (folder.path / "config.yaml").read_text())
    name = folders[0].experiment
    made = make_executor(Folder(sweep), scheduler, {})
    tasks = made.folder / f"tasks-{secrets.token_hex(4)}.txt"
    write_atomic(tasks, "".join(f"{folder.path}\n" for folder in folders))
    asked = make_submitit_parameters(profile, name, nodes, per_node, sweep, tasks, find_entry_points(folders[0]))
    made.update_parameters(**asked, array_parallelism=parallel)
    return made


def write_settings_and_retire_result(folder: Folder, text: str) -> Path | None:
    """Write the settings that a job reads, as YAML, and retire the result of an earlier attempt.

    Returns where that is then. Raises UserError.
    """
    with disk_errors(folder.path):
        (folder.path / "submit").mkdir(exist_ok=True)
    write_atomic(folder.path / "submit" / "config.yaml", text)
    return folder.retire_result()


def make_job_reference(folder: Folder) -> Any:
    """Return the object that a task of the job unpickles and executes, from the run's own source."""
    return JobReference(find_entry_points(folder).job, str(folder.path))


def submit_array(made: Executor, folders: list[Folder]) -> list[str]:
    """Submit an array; returns the job ids of its tasks. Raises UserError with sbatch's own words."""
    with convert_sbatch_errors(made):
        return made.submit_tasks([make_job_reference(folder) for folder in folders])


def submit_job(made: Executor) -> str:
    """Submit the run; returns the job id. Raises UserError with sbatch's own words."""
    with convert_sbatch_errors(made):
        return str(made.submit(make_job_reference(made.run_folder)).job_id)


@contextlib.contextmanager
def convert_sbatch_errors(made: Executor) -> Iterator[None]:
    """Turn sbatch's errors into UserErrors; sbatch sees nothing of an allocation around this process."""
    assert made.scheduler is not None
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(clean_environment(before))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # Submitit repeats sbatch's complaint
            yield
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is not installed here; go to a login node, or use LAUNCH=local") from None
    except utils.FailedJobError as error:
        words = [line for line in str(error).splitlines() if line.startswith("sbatch:")]
        problem = " ".join(words) or str(error).splitlines()[-1]
        raise UserError(f"{made.scheduler.name} refused the job: {problem}") from None
    finally:
        os.environ.clear()
        os.environ.update(before)
