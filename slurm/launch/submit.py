"""The verb `exp`: check a name and its settings, then start the experiment here or submit it to SLURM.

Imports no torch: everything that can be refused is refused here, at once, also on a login node where importing torch
from a network disk takes half a minute. Words of ARGS that begin with `cluster.` are settings of the profile.
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

from common.checkpoint import extension
from common.core import config
from common.core.config import ROOT
from common.core.errors import RunTaken, UserError
from common.core.text import format_count, read_or_empty
from common.data import prepare
from common.distributed.transport import algorithms
from common.models import initial_weights
from common.pipeline import schedules
from common.runs import claims, provenance, wandb_account
from common.runs.folder import Folder, write_atomic
from common.training.optimization import own_files
from configs.elastic import find_elastic
from configs.profile import Profile
from configs.shared import Experiment
from slurm.arguments import check_experiment_name, parse_count, parse_switch, split_arguments
from slurm.reports import liveness, logs, selection, status
from slurm.scheduling import sbatch, submission
from slurm.scheduling.entry_points import find_entry_points
from slurm.scheduling.scheduler import Scheduler, choose_scheduler


def make_source_environment(folder: Folder) -> dict[str, str]:
    """Return the environment in which only a run's own code/ is imported."""
    return dict(os.environ) | {"PYTHONPATH": str(folder.path / "code"), "PYTHONSAFEPATH": "1"}


def make_resume_command(folder: Folder) -> list[str]:
    """Return the command that runs or resumes a run folder on this machine, with the run's own source."""
    script = folder.path / "code" / "experiments" / f"{folder.experiment}.py"
    return [sys.executable, str(script), "--resume", str(folder.path)]


@contextlib.contextmanager
def remove_folder_on_error(folder: Folder) -> Iterator[None]:
    """Remove a run folder if the block fails."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


@contextlib.contextmanager
def restore_result_on_error(folder: Folder) -> Iterator[None]:
    """Give a run back the result that the block has retired if the block fails."""
    result = read_or_empty(str(folder.path / "result.json"))
    places = [attempt.attempt / "result.json" for attempt in folder.attempts()]
    missing = [place for place in places if not place.exists()]
    try:
        yield
    except BaseException:
        if result:
            write_atomic(folder.path / "result.json", result)
        for place in missing:
            place.unlink(missing_ok=True)
        raise


def print_simulated_hosts(settings: Experiment) -> None:
    """Print a line where hosts are simulated as processes of this machine."""
    if settings.launch.nodes > 1:
        print(f"no SLURM is used: {settings.launch.nodes} nodes are simulated as processes of this machine", flush=True)


def exec_script(name: str, settings: Experiment, words: list[str], resumed: Folder | None) -> None:
    """Become the experiment's script, for a resumed run that of its source; never returns. Raises UserError."""
    script = (resumed.path / "code" if resumed else ROOT) / "experiments" / f"{name}.py"
    if resumed and not script.is_file():
        raise UserError(f"{resumed.path} has no source in code/ any more, and cannot go on; start a new run")
    print_simulated_hosts(settings)
    environ = make_source_environment(resumed) if resumed else dict(os.environ)
    os.execve(sys.executable, [sys.executable, str(script), *words], environ)


def prepare_run_folder(name: str, settings: Experiment, scheduler: Scheduler | None, shown_notices: set[str]) -> Folder:
    """Make a run folder with everything the job needs: data, settings, source, description.

    A notice about the data is printed unless it is among `shown_notices`, to which it is added.
    """
    fallback = scheduler is None or scheduler.local is not None
    found = prepare.prepare_dataset(settings.data, fallback, log=settings.log)
    prepare.check_model_fits_data(settings, found)
    if found.notice and found.notice not in shown_notices:
        print(found.notice, flush=True)
        shown_notices.add(found.notice)
    settings.data.name = found.name
    for key, path in settings.list_paths().items():  # it may start in another folder
        group, _, last = key.rpartition(".")
        setattr(getattr(settings, group) if group else settings, last, str(Path(path).absolute()))
    folder = Folder.create(Path(settings.runs), name, config.format_yaml(settings))
    with remove_folder_on_error(folder):
        provenance.copy_source(folder)
        found.copy_own_data_file(folder.path / "code")
        schedules.copy_schedule_file(settings, folder.path / "code")
        algorithms.copy_algorithm_file(settings.launch, folder.path / "code")
        own_files.copy_optimizer_files(settings.optim, folder.path / "code")
        command = ["make", "exp", f"NAME={name}", f"NODES={settings.launch.nodes}"]
        provenance.write_metadata(folder, command, found.to_dict())
    return folder


def find_resumable_run(run: str, name: str) -> Folder:
    """Find the folder of a run that can be resumed; `name` is empty or its experiment. Raises UserError."""
    if not run:
        raise UserError("RESUME is empty; write RESUME=<id>, or leave it out for a new run")
    folder = selection.find_run(run, Path("runs"))
    state, _ = status.read_state(folder)
    if name and name != folder.experiment:
        raise UserError(f"RESUME={shlex.quote(run)} is a run of {folder.experiment}, not of {name}; leave NAME out")
    if state not in status.OVER:
        claim = claims.find_newest_claim(folder) if state == "RUNNING" else None
        where = f" ({claim.describe()})" if claim is not None else ""
        remedy = f"to go on with it elsewhere, first make cancel RUN={shlex.quote(run)}"
        raise UserError(f"{folder.path.name} is {state}{where}; {remedy}")
    provenance.check_source(folder)
    return folder


def submit_run(
    name: str, settings: Experiment, profile: Profile, scheduler: Scheduler, resumed: Folder | None
) -> tuple[Folder, str]:
    """Submit a run; returns its folder and its job id. Leaves no new folder behind if it is refused."""
    if resumed:
        with submission.hold_submission(resumed):
            check_is_over(resumed, settings)
            return resumed, resubmit_run(resumed, settings, profile, scheduler)
    folder = prepare_run_folder(name, settings, scheduler, set())
    with remove_folder_on_error(folder):
        return folder, submit_folder(folder, settings, config.format_yaml(settings), profile, scheduler)


def check_is_over(folder: Folder, settings: Experiment) -> None:
    """Raise RunTaken where another command has started or submitted a run, or it has finished, since it was chosen."""
    state, detail = status.read_state(folder)
    has_finished = state == "FINISHED" and not extension.has_more_steps(folder, settings)
    if state not in status.OVER or has_finished:
        if state == "FINISHED":
            raise RunTaken(f"{folder.path.name} has just finished; see make status")
        taker = describe_taker(folder, detail or state.lower())
        raise RunTaken(f"{folder.path.name}: another command has just started it ({taker}); see make status")


def describe_taker(folder: Folder, fallback: str) -> str:
    """Describe the process or job that has a run; `fallback` where neither is known."""
    claim = claims.find_newest_claim(folder)
    if claim is not None and not claim.job and claim.judge() is claims.Life.ALIVE:
        return claim.describe()  # meta.json may still have an earlier job
    job = provenance.read_metadata(folder).get("job")
    return f"job {job['id']}" if job else fallback


def resubmit_run(resumed: Folder, settings: Experiment, profile: Profile, scheduler: Scheduler) -> str:
    """Submit a run that is over once more; returns its job id. Raises UserError."""
    schedules.copy_schedule_file(settings, resumed.path / "code")
    algorithms.copy_algorithm_file(settings.launch, resumed.path / "code")
    own_files.copy_optimizer_files(settings.optim, resumed.path / "code")
    text = config.format_known_yaml(settings, resumed.path / "config.yaml")
    return submit_folder(resumed, settings, text, profile, scheduler)


def submit_folder(folder: Folder, settings: Experiment, text: str, profile: Profile, scheduler: Scheduler) -> str:
    """Submit a run folder that holds all the job needs; `text` are its settings as YAML. Returns the job id."""
    nodes = settings.launch.nodes
    per_node, entry_points, elastic = settings.processes // nodes, find_entry_points(folder), find_elastic(settings)
    if elastic and not entry_points.elastic:
        what = f"{folder.path.name} was made with a source that knows elastic=true on one machine only"
        raise UserError(f"{what}; use LAUNCH=local, or begin a new run")
    asked = sbatch.make_submitit_parameters(
        profile, folder.experiment, nodes, per_node, folder.path, entry_points=entry_points, elastic=elastic
    )
    made = sbatch.make_executor(folder, scheduler, asked, elastic)
    with restore_result_on_error(folder):
        sbatch.write_settings_and_retire_result(folder, text)
        job = sbatch.submit_job(made)
    provenance.update_metadata(folder, job={"id": job, "scheduler": scheduler.name, "profile": vars(profile)})
    return job


def print_job(folder: Folder, settings: Experiment, job: str, scheduler: Scheduler) -> None:
    """Print where a job's run is, and how to follow and end it."""
    nodes, ranks = format_count(settings.launch.nodes, "node"), format_count(settings.processes, "rank")
    run = shlex.quote(folder.reference)
    alone = settings.processes == 1 and hasattr(settings, "processes_per_node")
    hint = ": nothing is distributed; NODES=2 or ARGS=processes_per_node=2 has two" if alone else ""
    print(f"{folder.experiment}: job {job} on {scheduler.name}, {nodes}, {ranks}{hint}")
    print(f"  run folder  {folder.path}\n  follow      make logs RUN={run} FOLLOW=1")
    print(f"  cancel      make cancel RUN={run}", flush=True)


def resolve_processes_per_node(settings: Experiment, profile: Profile) -> None:
    """Set the ranks per host, where the settings leave it open: one for each GPU of the profile.

    Raises UserError where the settings do not fit that number.
    """
    if getattr(settings, "processes_per_node", None) == 0:
        settings.processes_per_node = profile.ranks_per_node  # type: ignore[attr-defined]
        try:
            settings.check()
        except ValueError as error:
            raise UserError(str(error)) from None


def check_step_timeout(settings: Experiment, profile: Profile) -> None:
    """Raise UserError where a job that hangs could not save before its time is over."""
    if settings.launch.step_timeout >= profile.signal_seconds:
        raise UserError(
            f"launch.step_timeout={settings.launch.step_timeout:g} is no shorter than cluster.signal_seconds="
            f"{profile.signal_seconds}: a job that hangs would not save in time; lower the first or raise the second"
        )


def check_source_knows_settings(folder: Folder, words: list[str]) -> None:
    """Raise UserError for a setting that the source of a resumed run does not know."""
    known = config.read_config_file(folder.path / "config.yaml")
    new = [name for name in config.parse_command_line(words).values if name not in known]
    if new:
        raise UserError(f"{folder.path.name} was made with a source that has no setting {', '.join(new)}; leave it out")


def print_dry_run(name: str, settings: Experiment, profile: Profile) -> None:
    """Print what would be submitted; nothing is left behind."""
    nodes = settings.launch.nodes
    with tempfile.TemporaryDirectory() as scratch:
        folder = Folder(Path(scratch))
        per_node, elastic = settings.processes // nodes, find_elastic(settings)
        asked = sbatch.make_submitit_parameters(profile, name, nodes, per_node, folder.path, elastic=elastic)
        text = sbatch.make_executor(folder, None, asked, elastic).make_job_script()
    print(text.replace(scratch, f"{settings.runs}/{name}-<time>-<id>"))
    print(f"# {name}: settings\n{config.format_yaml(settings)}", end="")


def main(given: argparse.Namespace) -> int:
    """Run an experiment or resume a run; returns the exit status. Raises UserError."""
    resumed = None if given.resume is None else find_resumable_run(given.resume, given.name)
    name = check_experiment_name(resumed.experiment if resumed else given.name)
    words, for_profile = split_arguments(given.args)
    if given.nodes:
        words.append(f"launch.nodes={parse_count('NODES', given.nodes)}")
    if resumed:
        words = ["--resume", str(resumed.path), *words]
    follow, dry, strict = (parse_switch(key.upper(), getattr(given, key)) for key in ("follow", "dry_run", "strict"))
    settings = config.load_config(config.import_schema(name), words)
    schedules.check_schedule_of_config(settings, resumed.path / "code" if resumed else None)
    algorithms.check_algorithm_of_config(settings, resumed.path / "code" if resumed else None)
    own_files.check_files_of_config(settings.optim, resumed.path / "code" if resumed else None)
    if resumed is None:
        initial_weights.check_weights_of_config(settings)
    else:
        extension.check_settings_of_finished(resumed, settings)
    wandb_account.read_requested_mode(settings)
    profile = sbatch.load_profile(given.cluster or "default", for_profile)
    check_step_timeout(settings, profile)
    if strict and provenance.has_uncommitted_changes():
        raise UserError(
            "STRICT=1, but the checkout has changes that are not committed; commit them, or leave STRICT out"
        )
    if dry:
        resolve_processes_per_node(settings, profile)
        print_dry_run(name, settings, profile)
        return 0
    if resumed and resumed.result.get("state") == "finished" and not extension.has_more_steps(resumed, settings):
        print(extension.describe_finished(resumed, settings))
        return 0
    if resumed:
        liveness.wait_for_earlier_attempt(resumed)
    alone = getattr(settings, "sweep", False)
    if alone and given.launch.partition(":")[0] == "slurm":
        raise UserError(
            "sweep=true runs on this machine, one run after the other; leave LAUNCH=slurm out, or see make sweep"
        )
    scheduler = None if alone else choose_scheduler(given.launch or "auto")
    if scheduler is None:
        if resumed:
            check_is_over(resumed, settings)  # another command may have waited for the same attempt
        exec_script(name, settings, words, resumed)
        return 0
    if resumed:
        check_source_knows_settings(resumed, words)
    elastic = find_elastic(settings)
    scheduler.check_enough_hosts(settings.launch.nodes, profile.partition, elastic.spares if elastic else 0)
    resolve_processes_per_node(settings, profile)
    folder, job = submit_run(name, settings, profile, scheduler, resumed)
    print_job(folder, settings, job, scheduler)
    return logs.follow_log(folder, logs.find_rank_0_log(folder)) if follow else 0
