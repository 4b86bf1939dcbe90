"""Creation of job scripts from a cluster profile, and submission of the job scripts with Submitit."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor

from common.config import config
from common.config.config import ROOT
from common.runs.folder import RunFolder, convert_disk_errors, write_atomic
from common.system.errors import UserError
from configs.dataparallel import Elastic
from configs.profile import Profile
from slurm.scheduling import entry_points
from slurm.scheduling.entry_points import JobReference, check_source_version
from slurm.scheduling.scheduler import Scheduler, remove_launcher_variables

SAFE_VALUE = re.compile(r"[\w.,:=@/+\-\[\]%&|* ]*")
SAFE_PATH = re.compile(r"[\w.,=@/+\- ]+")  # without colons, which separate the folders in PYTHONPATH
SRUN_SEPARATOR = "--"
"""Separator between the srun command and the command of a rank in the arguments of the elastic launcher."""


def load_profile(name: str, overrides: list[str]) -> Profile:
    """Load the profile configs/cluster/NAME.yaml and apply `cluster.key=value` arguments. Raises UserError."""
    folder = ROOT / "configs" / "cluster"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        raise UserError(
            f"unknown CLUSTER={name}; choose one of {', '.join(names)} (configs/cluster/), or use LAUNCH=slurm:NAME "
            "for a local cluster"
        )
    return make_profile(config.read_config_file(folder / f"{name}.yaml"), overrides)


def make_profile(values: Mapping[str, Any], overrides: list[str]) -> Profile:
    """Create a profile from text values and apply `cluster.key=value` arguments. Raises UserError."""
    pairs = dict(override.removeprefix("cluster.").split("=", 1) for override in overrides)
    profile = config.build_config(Profile, [values, pairs])
    for key, value in vars(profile).items():
        lines = value if isinstance(value, list) else [str(value)]
        for line in lines:
            if re.search(r"[\n\r\0]", line):
                raise UserError(f"cluster.{key} must not contain line breaks; write each command as a separate item")
            if key != "setup" and not SAFE_VALUE.fullmatch(line):
                raise UserError(f"cluster.{key}={value}: only letters, digits, spaces, and ._,:=@/+-[]%&|* are allowed")
    return profile


def make_submitit_parameters(
    profile: Profile,
    name: str,
    nodes: int,
    per_node: int,
    folder: Path,
    tasks: Path | None = None,
    elastic: Elastic | None = None,
) -> dict[str, Any]:
    """Return Submitit's parameters for a job or job array.

    Empty values are omitted, so that the defaults of the cluster apply. For a job array, `tasks` is a file that lists
    the run folders of the array tasks, one per line. For a single job, `folder` is the run folder.
    """
    run_folder = shlex.quote(str(folder))
    setup = []
    if tasks:
        run_folder = '"$RUN"'
        setup.append(f'RUN="$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(tasks))})"')
    # The job executes the source code that was submitted. `python -m` must not import modules from the current folder.
    setup.append(f"export PYTHONPATH={run_folder}/code PYTHONSAFEPATH=1")
    # The teardown command runs outside the job step, so it survives the failure of any rank.
    teardown = f"{shlex.quote(sys.executable)} -m {entry_points.REQUEUE_MODULE} {run_folder} $?"
    # srun does not inherit --cpus-per-task from sbatch.
    srun_args = [f"--kill-on-bad-exit={int(not elastic)}", f"--cpus-per-task={profile.cpus}", *profile.container]
    sbatch_options = {"requeue" if profile.requeue else "no-requeue": True}
    if elastic:
        sbatch_options["no-kill"] = True  # SLURM continues the job when a host is lost

    parameters: dict[str, Any] = {
        "job_name": name,
        "nodes": nodes + (elastic.spares if elastic else 0),
        "ntasks_per_node": per_node,
        "cpus_per_task": profile.cpus,
        "time": profile.time,
        "signal_delay_s": profile.signal_seconds,
        "stderr_to_stdout": True,
        "wckey": None,  # Submitit would request a key of its own
        "setup": setup + profile.setup,
        "teardown": [teardown],
        "srun_args": srun_args,
        "additional_parameters": sbatch_options,
    }
    for key, value in make_resource_options(profile).items():
        parameters[key.replace("-", "_")] = value
    return parameters


def make_resource_options(profile: Profile) -> dict[str, str]:
    """Return the sbatch and srun options for the hosts, memory and GPUs that the profile specifies."""
    options = {key: getattr(profile, key) for key in ("partition", "account", "qos", "constraint", "exclude", "wckey")}
    if profile.memory_gb:
        options["mem"] = f"{round(profile.memory_gb * 1024)}M"
    if profile.gpus:
        prefix = "gpu:" if profile.gpus_as == "gres" else ""
        gpu_type = f"{profile.gpu_type}:" if profile.gpu_type else ""
        options[profile.gpus_as] = f"{prefix}{gpu_type}{profile.gpus}"
    return {key: value for key, value in options.items() if value}


class Executor(SlurmExecutor):
    """Submitit executor that submits to the chosen SLURM cluster and writes the job script to the run folder."""

    def __init__(self, folder: RunFolder, scheduler: Scheduler | None, launcher: str = "") -> None:
        """Create the executor of a run folder.

        `launcher` is empty or a shell command that receives the srun command as its arguments.
        """
        self.run_folder = folder
        self.scheduler = scheduler
        self.launcher = launcher
        super().__init__(folder.path / "submit")

    @classmethod
    def affinity(cls) -> int:
        return 2  # always available, because srun may be installed only inside the local cluster

    def make_job_script(self) -> str:
        """Return the job script exactly as it is passed to sbatch."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))

    def submit_tasks(self, jobs: list[Any]) -> list[str]:
        """Submit all jobs as one job array, and return the job ids of the array tasks.

        Submitit's own method for job arrays would not use this class and would therefore ignore the chosen cluster.
        """
        paths = []
        for job in jobs:
            delayed = utils.DelayedSubmission(job)
            delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            path = self.folder / f"{secrets.token_hex(16)}.pkl"
            delayed.dump(path)
            paths.append(path)
        self.parameters["map_count"] = len(jobs)
        array: Any = self._submit_command(self._submitit_command_str)
        ids = [f"{array.job_id}_{number}" for number in range(len(jobs))]
        for job_id, path in zip(ids, paths, strict=True):
            utils.JobPaths(self.folder, job_id).move_temporary_file(path, "submitted_pickle")
        return ids

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        if self.launcher:
            command = f"{SRUN_SEPARATOR} {command}"
        text: str = super()._make_submission_file_text(command, uid)
        if self.launcher:
            setup, mark, commands = text.partition("\n# command\n")
            srun = f"\n{self.launcher} srun "
            text = setup + mark + commands.replace("\nsrun ", srun, 1)
            assert srun in text
        write_atomic(self.folder / "job.sh", text)
        return text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        assert self.scheduler is not None
        return self.scheduler.build_command("sbatch", str(submission_file_path))


def make_executor(
    folder: RunFolder, scheduler: Scheduler | None, parameters: dict[str, Any], elastic: Elastic | None = None
) -> Executor:
    """Create the executor of a run folder. Raises UserError."""
    path = str(folder.path)
    if not SAFE_PATH.fullmatch(path):
        raise UserError(
            f"the path {path!r} is not allowed in a job script; use only letters, digits, and _.,=@/+- in runs"
        )
    launcher = ""
    if elastic:
        launcher = shlex.join([sys.executable, "-m", entry_points.ELASTIC_LAUNCHER_MODULE, path])
    executor = Executor(folder, scheduler, launcher)
    with convert_disk_errors(executor.folder):
        executor.folder.mkdir(parents=True, exist_ok=True)
    executor.update_parameters(**parameters)
    return executor


def prepare_runs_for_array(
    sweep: Path,
    folders: list[RunFolder],
    texts: list[str],
    nodes: int,
    per_node: int,
    profile: Profile,
    scheduler: Scheduler,
    parallel: int,
) -> Executor:
    """Prepare run folders for a job array with one task per run, and return the executor. Raises UserError.

    `sweep` is the folder of the sweep. `texts` contains the settings of each run as YAML. `parallel` is the maximum
    number of jobs that run at the same time.
    """
    for folder in folders:
        check_source_version(folder)
    for folder, text in zip(folders, texts, strict=True):
        write_settings_and_retire_result(folder, text)
    executor = make_executor(RunFolder(sweep), scheduler, {})
    tasks = executor.folder / f"tasks-{secrets.token_hex(4)}.txt"
    write_atomic(tasks, "".join(f"{folder.path}\n" for folder in folders))
    parameters = make_submitit_parameters(profile, folders[0].experiment, nodes, per_node, sweep, tasks)
    executor.update_parameters(**parameters, array_parallelism=parallel)
    return executor


def write_settings_and_retire_result(folder: RunFolder, text: str) -> Path | None:
    """Write the settings of a job as YAML, and move the result of an earlier attempt into its attempt folder.

    Returns the new path of the result, or None if there was no result. Raises UserError.
    """
    with convert_disk_errors(folder.path):
        (folder.path / "submit").mkdir(exist_ok=True)
    write_atomic(folder.path / "submit" / "config.yaml", text)
    return folder.move_result_of_previous_attempt()


def submit_array(executor: Executor, folders: list[RunFolder]) -> list[str]:
    """Submit a job array, and return the job ids of its tasks. Raises UserError with the message from sbatch."""
    with convert_sbatch_errors(executor):
        return executor.submit_tasks([make_job_reference(folder) for folder in folders])


def make_job_reference(folder: RunFolder) -> Any:
    """Return an object that each task of a job unpickles and executes with the run's copy of the source code."""
    return JobReference(str(folder.path))


def submit_job(executor: Executor) -> str:
    """Submit a run, and return the job id. Raises UserError with the message from sbatch."""
    with convert_sbatch_errors(executor):
        return str(executor.submit(make_job_reference(executor.run_folder)).job_id)


def find_sbatch_problem(error: Exception) -> str:
    """Return the message of sbatch, or of a program that replaces it, in one line. Without a message, say so."""
    process = error.__cause__
    lines = str(error).splitlines()
    if not lines and isinstance(process, subprocess.CalledProcessError):
        lines = str(process.output or "").splitlines() or [f"sbatch ended with status {process.returncode}"]
    return " ".join(line for line in lines if line.startswith("sbatch:")) or " ".join(lines[-1:])


@contextlib.contextmanager
def convert_sbatch_errors(executor: Executor) -> Iterator[None]:
    """Convert errors from sbatch to UserErrors inside the block.

    If this process runs inside a SLURM allocation, the environment variables of the allocation are hidden from sbatch.
    Ctrl-C is ignored, also by sbatch, because this process would not know whether sbatch has submitted the job.
    """
    assert executor.scheduler is not None
    interrupt_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    environ = dict(os.environ)
    os.environ.clear()
    os.environ.update(remove_launcher_variables(environ))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # Submitit also prints the errors of sbatch
            yield
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is not installed here; use a login node, or LAUNCH=local") from None
    except utils.FailedJobError as error:
        raise UserError(f"{executor.scheduler.name} rejected the job: {find_sbatch_problem(error)}") from None
    except utils.FailedSubmissionError as error:
        problem = " ".join(str(error).split())
        remedy = "check with squeue --me whether there is a new job, and cancel it with scancel"
        name = executor.scheduler.name
        raise UserError(f"{name}: the output of sbatch has no job id ({problem}); {remedy}") from None
    finally:
        os.environ.clear()
        os.environ.update(environ)
        signal.signal(signal.SIGINT, interrupt_handler)
