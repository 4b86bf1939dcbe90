"""The verb `exp`: check settings, then start an experiment on this machine or submit it to SLURM.

This module does not import torch, so it reports invalid settings immediately. On a login node, importing torch
from a network disk can take half a minute. Arguments in ARGS that begin with `cluster.` are settings of the cluster
profile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.checkpoint import extension
from common.config import config, config_keys, custom_code
from common.config.command_line import parse_command_line
from common.config.config import ROOT
from common.data import prepare
from common.models import initial_weights
from common.runs import claims, provenance
from common.runs.folder import RunFolder, write_atomic
from common.runs.resolved_settings import record_resolved_settings
from common.runs.tracking import wandb_account
from common.system.errors import RunTakenError, UserError
from common.system.text import format_count, read_text_or_empty
from configs.dataparallel import RanksPerNode, count_spare_hosts, get_enabled_elastic_settings
from configs.fields import find_group
from configs.profile import Profile
from configs.shared import Experiment
from configs.sweeps import is_sweep
from slurm.arguments import (
    check_experiment_name,
    parse_count,
    parse_zero_or_one,
    split_experiment_and_cluster_arguments,
)
from slurm.launch import settings_files
from slurm.launch.source_check import check_source
from slurm.reports import liveness, logs, selection, status
from slurm.scheduling import sbatch, submission
from slurm.scheduling.entry_points import check_source_version
from slurm.scheduling.scheduler import Scheduler, choose_scheduler


def make_source_environment(folder: RunFolder) -> dict[str, str]:
    """Return an environment in which Python imports modules from the source code in `code/` of the run folder.

    Raises UserError if PYTHONPATH cannot contain the path.
    """
    if os.pathsep in str(folder.path):
        raise UserError(f"{folder.path}: the path must not contain {os.pathsep!r}; move the run to another folder")
    return dict(os.environ) | {"PYTHONPATH": str(folder.path / "code"), "PYTHONSAFEPATH": "1"}


def make_resume_command(folder: RunFolder) -> list[str]:
    """Return the command that starts or resumes a run on this machine with the run's copy of the source code."""
    script = folder.path / "code" / "experiments" / f"{folder.experiment}.py"
    return [sys.executable, str(script), "--resume", str(folder.path)]


@contextlib.contextmanager
def remove_folder_on_error(folder: RunFolder) -> Iterator[None]:
    """Remove a run folder if the block fails."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


@contextlib.contextmanager
def restore_result_on_error(folder: RunFolder) -> Iterator[None]:
    """Restore result.json if the block moves it away and then fails."""
    result = read_text_or_empty(str(folder.path / "result.json"))
    retired_paths = [attempt.attempt_folder / "result.json" for attempt in folder.list_attempts()]
    new_paths = [path for path in retired_paths if not path.exists()]
    try:
        yield
    except BaseException:
        if result:
            write_atomic(folder.path / "result.json", result)
        for path in new_paths:
            path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def name_job_on_error(job: str, scheduler: Scheduler) -> Iterator[None]:
    """Add the id of a submitted job to the error if the block cannot record the job."""
    try:
        yield
    except UserError as error:
        command = shlex.join(scheduler.build_command("scancel", job))
        problem = f"job {job} was submitted but not recorded: {error}; to cancel the job, run {command}"
        raise UserError(problem, cause=error.cause) from None


def print_simulated_hosts(settings: Experiment) -> None:
    """Print a notice if several hosts are simulated by processes on this machine."""
    if settings.launch.nodes > 1:
        print(f"not using SLURM: {settings.launch.nodes} nodes are simulated by processes on this machine", flush=True)


def exec_script(name: str, settings: Experiment, arguments: list[str], resumed: RunFolder | None) -> None:
    """Replace this process with the script of the experiment. Raises UserError.

    A resumed run uses the script in the run's copy of the source code.
    """
    source = resumed.path / "code" if resumed else ROOT
    script = source / "experiments" / f"{name}.py"
    if resumed and not script.is_file():
        raise UserError(f"{resumed.path} no longer has its source code in code/ and cannot be resumed; start a new run")
    print_simulated_hosts(settings)
    environ = make_source_environment(resumed) if resumed else dict(os.environ)
    os.execve(sys.executable, [sys.executable, str(script), *arguments], environ)


def prepare_run_folder(
    name: str, settings: Experiment, scheduler: Scheduler | None, shown_notices: set[str]
) -> RunFolder:
    """Prepare the data, and create a run folder with the settings, source code, and metadata of the run.

    Each notice about the data is printed only once. `shown_notices` contains the notices that have been printed.
    """
    fallback = scheduler is None or scheduler.local is not None
    dataset = prepare.prepare_dataset_of_config(settings, fallback)
    if dataset.notice and dataset.notice not in shown_notices:
        print(dataset.notice, flush=True)
        shown_notices.add(dataset.notice)
    # The job may start in another folder, so its paths are absolute.
    absolute_paths = {key: str(Path(path).absolute()) for key, path in settings_files.list_paths(settings).items()}
    text = config.format_yaml(config_keys.replace_values(settings, absolute_paths))
    folder = RunFolder.create(Path(absolute_paths["runs"]), name, text)
    with remove_folder_on_error(folder):
        record_resolved_settings(folder.path, prepare.list_replaced_settings(settings, dataset))
        provenance.copy_source(folder)
        dataset.copy_user_files(folder.path / "code")
        provenance.copy_custom_files(settings, folder.path / "code")
        command = ["make", "exp", f"NAME={name}", f"NODES={settings.launch.nodes}"]
        provenance.write_metadata(folder, command, dataset.to_dict())
    return folder


def find_resumable_run(run: str, name: str) -> RunFolder:
    """Return the folder of a run that can be resumed. Raises UserError.

    `name` must be empty or the name of the run's experiment.
    """
    if not run:
        raise UserError("RESUME is empty; set RESUME=<id>, or omit RESUME to start a new run")
    folder = selection.find_run_of_experiment(run, Path("runs"))
    state, detail = status.read_state(folder)
    if name and name != folder.experiment:
        raise UserError(f"RESUME={shlex.quote(run)} is a run of {folder.experiment}, not of {name}; omit NAME")
    if state == "UNKNOWN":
        raise UserError(f"{folder.path.name} is UNKNOWN; {detail}")
    if state not in status.FINAL_STATES:
        claim = claims.find_newest_claim(folder) if state == "RUNNING" else None
        place = f" ({claim.describe()})" if claim is not None else ""
        remedy = f"to resume the run elsewhere, first run make cancel RUN={shlex.quote(run)}"
        raise UserError(f"{folder.path.name} is {state}{place}; {remedy}")
    check_source(folder)
    return folder


def submit_run(
    name: str, settings: Experiment, profile: Profile, scheduler: Scheduler, resumed: RunFolder | None
) -> tuple[RunFolder, str]:
    """Submit a run, and return its folder and job id.

    If the submission of a new run fails, the new run folder is removed.
    """
    if resumed:
        with submission.lock_run_for_submission(resumed):
            check_run_has_ended(resumed, settings)
            return resumed, resubmit_run(resumed, settings, profile, scheduler)
    folder = prepare_run_folder(name, settings, scheduler, set())
    text = (folder.path / config.CONFIG_FILE).read_text()
    return folder, submit_prepared_run(folder, settings, text, profile, scheduler, is_new=True)


def check_run_has_ended(folder: RunFolder, settings: Experiment) -> None:
    """Raise RunTakenError if another command has started, submitted, or finished the run in the meantime."""
    state, detail = status.read_state(folder)
    if state == "FINISHED" and not extension.config_adds_steps(folder, settings):
        raise RunTakenError(f"{folder.path.name} has just finished; see make status")
    if state not in status.FINAL_STATES:
        taker = describe_owner_of_run(folder, detail or state.lower())
        raise RunTakenError(f"{folder.path.name} was just started by another command ({taker}); see make status")


def describe_owner_of_run(folder: RunFolder, fallback: str) -> str:
    """Describe the process or job that is executing a run. Return `fallback` if no process or job is known."""
    claim = claims.find_newest_claim(folder)
    if claim is not None and not claim.job and claim.check_process() is claims.ProcessState.ALIVE:
        return claim.describe()  # meta.json may still name an earlier job
    job = provenance.read_metadata(folder).get("job")
    return f"job {job['id']}" if job else fallback


def resubmit_run(resumed: RunFolder, settings: Experiment, profile: Profile, scheduler: Scheduler) -> str:
    """Submit an ended run as a new job and return the job id. Raises UserError."""
    provenance.copy_custom_files(settings, resumed.path / "code")
    text = settings_files.format_yaml_with_keys_of_file(settings, resumed.path / config.CONFIG_FILE)
    return submit_prepared_run(resumed, settings, text, profile, scheduler, is_new=False)


def submit_prepared_run(
    folder: RunFolder, settings: Experiment, text: str, profile: Profile, scheduler: Scheduler, *, is_new: bool
) -> str:
    """Submit a fully prepared run folder and return the job id. Raises UserError.

    `text` contains the settings as YAML. If the submission fails, the folder of a new run is removed.
    """
    undo_on_error = remove_folder_on_error if is_new else restore_result_on_error
    with undo_on_error(folder):
        check_source_version(folder)
        executor = make_run_executor(folder, folder.experiment, settings, profile, scheduler)
        sbatch.write_settings_and_retire_result(folder, text)
        job = sbatch.submit_job(executor)
    with name_job_on_error(job, scheduler):
        provenance.update_metadata(folder, job=make_job_facts(job, scheduler, profile))
    return job


def make_job_facts(job: str, scheduler: Scheduler, profile: Profile) -> dict[str, Any]:
    """Return what meta.json records of a job."""
    cluster = scheduler.read_cluster_name()
    return {"id": job, "scheduler": scheduler.name, "cluster": cluster, "profile": vars(profile)}


def make_run_executor(
    folder: RunFolder, name: str, settings: Experiment, profile: Profile, scheduler: Scheduler | None
) -> sbatch.Executor:
    """Create the Submitit executor that submits a run of the experiment `name`."""
    nodes = settings.launch.nodes
    elastic = get_enabled_elastic_settings(settings)
    per_node = settings.processes // nodes
    parameters = sbatch.make_submitit_parameters(profile, name, nodes, per_node, folder.path, elastic=elastic)
    return sbatch.make_executor(folder, scheduler, parameters, elastic)


def print_job(folder: RunFolder, settings: Experiment, job: str, scheduler: Scheduler) -> None:
    """Print the job of a run and the commands that follow and cancel the run."""
    nodes = format_count(settings.launch.nodes, "node")
    ranks = format_count(settings.processes, "rank")
    run = shlex.quote(folder.reference)
    hint = ""
    if settings.processes == 1 and find_group(settings, RanksPerNode) is not None:
        hint = " (not distributed; for two ranks, use NODES=2 or ARGS=processes_per_node=2)"
    print(f"{folder.experiment}: job {job} on {scheduler.name}, {nodes}, {ranks}{hint}")
    print(f"  run folder  {folder.path}\n  follow      make logs RUN={run} FOLLOW=1")
    print(f"  cancel      make cancel RUN={run}", flush=True)


def resolve_processes_per_node(settings: Experiment, profile: Profile) -> Experiment:
    """Return settings with the number of ranks per host of the cluster profile, unless the settings specify a number.

    Raises UserError if other settings are incompatible with the number in the profile.
    """
    ranks = find_group(settings, RanksPerNode)
    if ranks is None or ranks.is_set:
        return settings
    resolved = config_keys.replace_values(settings, {"processes_per_node": profile.ranks_per_node})
    try:
        config_keys.check_combinations(resolved)
    except ValueError:
        return settings  # the number of ranks is fixed, as with strategy=single
    try:
        resolved.check()
    except ValueError as error:
        raise UserError(str(error)) from None
    return resolved


def check_step_timeout(settings: Experiment, profile: Profile) -> None:
    """Raise UserError if a hanging job could not save a checkpoint before the job reaches its time limit."""
    if settings.launch.step_timeout >= profile.signal_seconds:
        raise UserError(
            f"launch.step_timeout={settings.launch.step_timeout:g} must be less than cluster.signal_seconds="
            f"{profile.signal_seconds}, so that a hanging job can still save; lower the former or raise the latter"
        )


def check_source_knows_settings(folder: RunFolder, arguments: list[str]) -> None:
    """Raise UserError if a setting does not exist in the source code that the resumed run keeps."""
    known_settings = config.read_settings(folder.path)
    requested = parse_command_line(arguments).values
    unknown = [name for name in requested if name not in known_settings and f"{name}.on" not in known_settings]
    if unknown:
        names = ", ".join(unknown)
        raise UserError(f"the source code saved with {folder.path.name} has no setting {names}; remove it from ARGS")


def print_dry_run(name: str, settings: Experiment, profile: Profile, resumed: RunFolder | None, launch: str) -> None:
    """Print the job script and settings of a submission without creating a run folder. Raises UserError."""
    scheduler = choose_scheduler(launch)
    if scheduler is not None:
        check_step_timeout(settings, profile)
    with tempfile.TemporaryDirectory() as scratch:
        text = make_run_executor(RunFolder(Path(scratch)), name, settings, profile, None).make_job_script()
    print(text.replace(scratch, str(resumed.path) if resumed else f"{settings.runs}/{name}-<time>-<id>"))
    if scheduler is None:
        print("# not using SLURM: without DRY_RUN=1, this command runs on this machine and submits no job")
    print(f"# {name}: settings\n{config.format_yaml(settings)}", end="")


def load_checked_settings(name: str, arguments: list[str], resumed: RunFolder | None) -> Experiment:
    """Load and check the settings of a run and the files that the settings refer to. Raises UserError."""
    schema = config.import_schema(name)
    if resumed is not None:
        extension.check_requested_ranks(resumed, schema, parse_command_line(arguments).values)
    settings = config.load_config(schema, arguments)
    code = resumed.path / "code" if resumed else None
    custom_code.check_custom_settings(settings, code)
    if resumed is None:
        initial_weights.check_weights_of_config(settings)
    else:
        extension.check_resume(resumed, settings)
    wandb_account.read_requested_mode(settings)
    return settings


def exec_sweep(name: str, arguments: list[str], launch: str) -> None:
    """Replace this process with a program that runs the sweep of an experiment here. Raises UserError."""
    if launch not in ("", "auto", "local"):
        raise UserError(f"sweep=true executes all runs on this machine; omit LAUNCH={launch}, or use make sweep")
    command = [sys.executable, "-m", "slurm.launch.experiment_sweep", name, *arguments]
    os.execve(sys.executable, command, dict(os.environ))


def main(args: argparse.Namespace) -> int:
    """Run an experiment or resume a run, and return the exit status. Raises UserError."""
    resumed = None if args.resume is None else find_resumable_run(args.resume, args.name)
    name = check_experiment_name(resumed.experiment if resumed else args.name)
    arguments, profile_arguments = split_experiment_and_cluster_arguments(args.args)
    if parse_command_line(arguments).resume is not None:
        raise UserError("--resume is not allowed in ARGS; use make exp RESUME=<id>")
    if args.nodes:
        if "launch.nodes" in parse_command_line(arguments).values:
            raise UserError("NODES and launch.nodes in ARGS set the same number; omit one of them")
        arguments.append(f"launch.nodes={parse_count('NODES', args.nodes)}")
    if resumed:
        arguments = ["--resume", str(resumed.path), *arguments]
    follow = parse_zero_or_one("FOLLOW", args.follow)
    dry_run = parse_zero_or_one("DRY_RUN", args.dry_run)
    strict = parse_zero_or_one("STRICT", args.strict)

    settings = load_checked_settings(name, arguments, resumed)
    profile = sbatch.load_profile(args.cluster or "default", profile_arguments)
    if strict and provenance.has_uncommitted_changes():
        raise UserError("STRICT=1 requires a checkout without uncommitted changes; commit them, or omit STRICT")
    if resumed and resumed.result.get("state") == "finished" and not extension.config_adds_steps(resumed, settings):
        print(extension.explain_finished_run(resumed, settings))
        return 0
    if dry_run:
        settings = resolve_processes_per_node(settings, profile)
        print_dry_run(name, settings, profile, resumed, args.launch or "auto")
        return 0
    if resumed:
        liveness.wait_for_earlier_attempt(resumed)
    if is_sweep(settings):
        exec_sweep(name, arguments, args.launch)
    scheduler = choose_scheduler(args.launch or "auto")
    if scheduler is None:
        if resumed:
            check_run_has_ended(resumed, settings)  # another command may have started the run
        exec_script(name, settings, arguments, resumed)
        return 0
    check_step_timeout(settings, profile)
    if resumed:
        check_source_knows_settings(resumed, arguments)
    scheduler.check_enough_hosts(settings.launch.nodes, profile.partition, count_spare_hosts(settings))
    settings = resolve_processes_per_node(settings, profile)
    folder, job = submit_run(name, settings, profile, scheduler, resumed)
    print_job(folder, settings, job, scheduler)
    return logs.follow_log(folder, logs.find_rank_0_log(folder)) if follow else 0
