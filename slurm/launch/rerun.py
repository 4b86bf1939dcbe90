"""The verb `rerun`: repeat a run in a new run folder and compare the two runs.

The new run uses the settings and source code of the old run. Before the new run starts, the command prints every
difference in settings, packages, machine, ranks, and data. After the new run has ended, the command prints whether the
losses and final results are bitwise equal, or by how much they differ. Times and memory usage are not compared.

The exit status is 0 if the runs are equal, 3 if they differ, and 2 if the run cannot be repeated. If the new run does
not finish, the command exits with the exit status of the new run. This module does not import torch.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from common.config import changed_settings, config, config_keys, custom_code, yaml_values
from common.config.command_line import parse_command_line
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.runs import provenance, result
from common.runs.folder import RunFolder, convert_disk_errors
from common.system.errors import UserError
from configs.dataparallel import count_spare_hosts
from configs.profile import Profile
from configs.shared import Experiment
from slurm.arguments import split_experiment_and_cluster_settings
from slurm.launch import settings_files, submit
from slurm.launch.source_check import check_source
from slurm.reports import logs, selection, status
from slurm.scheduling import sbatch
from slurm.scheduling.entry_points import CHECK_COMMAND, check_source_version
from slurm.scheduling.scheduler import Scheduler, choose_scheduler

DIFFERENT = 3
"""Exit status of the command if the two runs differ."""
PATH_KEYS = ("runs", "data.root", "data.cache")
"""Settings that do not affect the results of a run."""
Comparisons = Iterator[tuple[str, Any, Any]]
"""Iterator over the items to compare. Each item consists of a name, an old value, and a new value."""


def find_repeatable_run(run: str) -> RunFolder:
    """Return the folder of a run that has ended and can be repeated. Raises UserError."""
    folder = selection.find_run_of_experiment(run, Path("runs"))
    state, _ = status.read_state(folder)
    if state not in status.FINAL_STATES:
        command = f"make status RUN={shlex.quote(run)} WAIT=600"
        raise UserError(f"{folder.path.name} is {state}; wait until the run has ended ({command})")
    if not (folder.path / "code" / "experiments" / f"{folder.experiment}.py").is_file():
        raise UserError(f"{folder.path} no longer has its source code in code/ and cannot be repeated; start a new run")
    check_source(folder)
    unknown = result.describe_unknown_format(folder.result)
    if unknown:
        raise UserError(f"{folder.path.name} cannot be compared: {unknown}")
    changes = changed_settings.read_changes_of_attempts(folder.path)
    if changes:
        raise UserError(
            f"{folder.path.name} was resumed with different settings ({changed_settings.describe_changes(changes)}), "
            "so it cannot be repeated by a single run; start a new run with the settings that you want"
        )
    return folder


def resolve_settings(old: RunFolder, overrides: list[str]) -> str:
    """Return the settings of the new run as YAML. Raises UserError.

    The settings are checked by the old run's copy of the source code. The settings in the current source code may have
    different names.
    """
    check_source_version(old)
    arguments = ["--config", str(old.path / "config.yaml"), *overrides, "--print-config"]
    command = [sys.executable, "-m", *CHECK_COMMAND, f"--args={shlex.join(arguments)}", "--", old.experiment]
    process = subprocess.run(
        command, env=submit.make_source_environment(old), capture_output=True, text=True, check=False
    )
    if process.returncode:
        errors = process.stderr.strip().splitlines() or ["the run's copy of the source code cannot be imported"]
        raise UserError(errors[-1].removeprefix("error: "))
    return process.stdout


def parse_settings_text(text: str) -> dict[str, Any]:
    """Parse YAML into a dict from the dotted name of each setting to its value as text."""
    return yaml_values.flatten_mapping(yaml_values.load_yaml(text) or {})


def build_config_from_known_keys(name: str, text: str) -> Experiment:
    """Build a config from the YAML settings `text`, without settings that the current source code lacks."""
    schema = config.import_schema(name)
    keys = config_keys.list_keys(schema)
    settings = {key: value for key, value in parse_settings_text(text).items() if key in keys}
    return config.build_config(schema, [settings])


def create_rerun_folder(
    old: RunFolder, text: str, settings: Experiment, dataset: PreparedDataset, *, overridden: Container[str] = ()
) -> RunFolder:
    """Create a new run folder with the source code of the old run.

    Custom files that the settings in `overridden` refer to are copied from their paths. All others are copied from the
    old run.
    """
    new = RunFolder.create(Path(settings.runs), old.experiment, text)
    code = new.path / "code"
    with submit.remove_folder_on_error(new):
        with convert_disk_errors(new.path):
            shutil.copytree(old.path / "code", code, ignore=shutil.ignore_patterns("__pycache__"))
        dataset.copy_user_files(code)
        provenance.copy_custom_files(settings, code, overwrite=overridden)
        provenance.write_metadata(new, ["make", "rerun", f"RUN={old.path.name}"], dataset.to_dict())
        provenance.update_metadata(new, git=provenance.read_metadata(old).get("git"), repeats=old.path.name)
    return new


# ---- before the start


def list_differences(
    old: RunFolder, text: str, settings: Experiment, dataset: PreparedDataset, scheduler: Scheduler | None
) -> Comparisons:
    """Yield the name, old value, and new value of every item that can differ between the old and the new run."""
    old_settings = config_keys.drop_training_keys(type(settings), config.read_settings(old.path))
    new_settings = parse_settings_text(text)
    for key in new_settings | old_settings:
        if key not in PATH_KEYS:
            yield key, old_settings.get(key), new_settings.get(key)

    meta = provenance.read_metadata(old)
    packages = meta.get("packages") or {}
    for package in provenance.PACKAGES:
        yield f"package {package}", packages.get(package), provenance.read_package_version(package)
    yield "python", meta.get("python"), platform.python_version()

    world = meta.get("world") or {}
    yield "ranks", world.get("processes"), settings.processes
    if scheduler is None and world.get("launched_by") == "local":  # the hosts of a job are not known yet
        machine = meta.get("machine") or {}
        yield "cpu", machine.get("cpu"), provenance.read_cpu_model()
        if settings.launch.threads == 0:
            yield "cores", machine.get("cores"), len(os.sched_getaffinity(0))
        is_on_gpu = provenance.uses_gpus(settings.launch, settings.processes)
        yield "device", "cpu" if world.get("device") == "cpu" else "gpu", "gpu" if is_on_gpu else "cpu"

    checksums = (meta.get("data") or {}).get("sha256") or {}
    for part, checksum in checksums.items():
        file = dataset.path / f"{part}.npy"
        yield f"data {part} of {dataset.name} (sha256 of {file})", checksum[:16], prepare.hash_file(file)[:16]


def print_differences(comparisons: Comparisons) -> int:
    """Print the items that differ, one per line, and return their number."""
    count = 0
    for name, old_value, new_value in comparisons:
        if old_value is not None and old_value != new_value:
            print(f"differs     {name}: was {old_value}, now {new_value}", flush=True)
            count += 1
    return count


# ---- running


def run_locally(new: RunFolder, settings: Experiment) -> int:
    """Execute a run on this machine, wait for the run to end, and return the exit status of the run."""
    submit.print_simulated_hosts(settings)
    with subprocess.Popen(submit.make_resume_command(new), env=submit.make_source_environment(new)) as process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run itself receives Ctrl-C and saves a checkpoint
        signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        return process.wait()


def run_on_cluster(new: RunFolder, settings: Experiment, text: str, profile: Profile, scheduler: Scheduler) -> int:
    """Submit a run to a cluster, print its log until the run ends, and return the exit status of the run."""
    job = submit.submit_prepared_run(new, settings, text, profile, scheduler, is_new=True)
    submit.print_job(new, settings, job, scheduler)
    return logs.follow_log(new, logs.find_rank_0_log(new))


# ---- after the end


def read_losses(folder: RunFolder) -> dict[int, float | None]:
    """Return the loss of each step. A loss that is NaN or infinite is returned as None."""
    return {row["global_step"]: row["loss"] for row in folder.read_rows() if "loss" in row}


def compute_distance(a: Any, b: Any) -> float:
    """Return |a - b| for two numbers. For other values, return 0 if the values are equal and infinity otherwise."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return float(abs(a - b))
    return 0.0 if a == b else math.inf


def compare_losses(old: RunFolder, new: RunFolder) -> bool:
    """Print and return whether the losses of two runs are bitwise equal.

    If the old run did not finish, later steps of the new run are ignored.
    """
    old_losses = read_losses(old)
    new_losses = read_losses(new)
    old_finished = old.result.get("state") == "finished"
    steps = [step for step in old_losses if step in new_losses]
    gaps = {step: compute_distance(old_losses[step], new_losses[step]) for step in steps}
    differing = [step for step in steps if gaps[step]]
    if differing:
        worst = max(differing, key=lambda step: gaps[step])
        count = f"{len(differing)} of {len(steps)} steps"
        print(
            f"losses      differ in {count}, first in step {differing[0]}, by at most {gaps[worst]:.3g} (step {worst})"
        )
    elif steps:
        print(f"losses      bitwise equal in {len(steps)} steps")

    is_measurement = old_finished and not old_losses and not new_losses
    missing_steps = len(steps) < len(old_losses) or (old_finished and len(steps) < len(new_losses))
    is_comparable = bool(steps) or is_measurement
    if missing_steps or not is_comparable:
        print(f"losses      {len(old_losses)} steps in the old run, {len(new_losses)} in the new run")
    return is_comparable and not differing and not missing_steps


def compare_results(old: RunFolder, new: RunFolder) -> bool:
    """Print and return whether the reproducible values of two results are equal."""
    old_values = result.parse_result(old.result).select_repeatable()
    new_values = result.parse_result(new.result).select_repeatable()
    differing = [key for key in old_values | new_values if old_values.get(key) != new_values.get(key)]
    for key in differing:
        old_value = old_values.get(key)
        new_value = new_values.get(key)
        distance = compute_distance(old_value, new_value)
        suffix = f", {distance:.3g} apart" if distance < math.inf else ""
        print(f"result      {key}: was {old_value}, now {new_value}{suffix}")
    if not differing:
        print(f"result      bitwise equal: {', '.join(old_values)}")
    return not differing


def compare_runs(old: RunFolder, new: RunFolder) -> bool:
    """Print whether two runs are bitwise equal, or by how much they differ. Return True if they are equal."""
    losses_are_equal = compare_losses(old, new)
    state = old.result.get("state", "no result")
    if state != "finished":
        print(f"result      not compared: the old run did not finish ({state})")
        return losses_are_equal
    return compare_results(old, new) and losses_are_equal


def compare_worlds(old: RunFolder, new: RunFolder) -> Comparisons:
    """Yield the items to compare whose values are known only after the ranks have formed a process group."""
    old_world = provenance.read_metadata(old).get("world") or {}
    new_world = provenance.read_metadata(new).get("world") or {}
    for key in ("launched_by", "nodes", "device", "backend", "threads"):
        yield key, old_world.get(key), new_world.get(key)


def choose_cluster_profile(old: RunFolder, cluster: str, overrides: list[str]) -> Profile:
    """Return the cluster profile named `cluster`, else the profile of the old run, else the default profile."""
    job: Mapping[str, Any] = provenance.read_metadata(old).get("job") or {}
    fields = vars(Profile())
    recorded = job.get("profile") or {}
    values = {key: value for key, value in recorded.items() if key in fields}
    if cluster or not values:
        return sbatch.load_profile(cluster or "default", overrides)
    return sbatch.make_profile(parse_settings_text(yaml.safe_dump(values)), overrides)


def main(args: argparse.Namespace) -> int:
    """Repeat a run, compare the old and the new run, and return the exit status."""
    old = find_repeatable_run(args.run)
    arguments, profile_arguments = split_experiment_and_cluster_settings(args.args)
    profile = choose_cluster_profile(old, args.cluster, profile_arguments)
    scheduler = choose_scheduler(args.launch or "auto")
    text = resolve_settings(old, [f"runs={old.path.parent}", *arguments])
    settings = build_config_from_known_keys(old.experiment, text)
    if scheduler is not None:  # the job starts in another folder, so relative paths would be wrong
        absolute_paths = [f"{key}={Path(path).absolute()}" for key, path in settings_files.list_paths(settings).items()]
        text = resolve_settings(old, arguments + absolute_paths)
        settings = build_config_from_known_keys(old.experiment, text)
        submit.check_step_timeout(settings, profile)
        scheduler.check_enough_hosts(settings.launch.nodes, profile.partition, count_spare_hosts(settings))

    overridden = parse_command_line(arguments).values
    old_code = old.path / "code"
    custom_code.check_custom_settings(settings, old_code, overridden)
    data_code = None if overridden.keys() & {"data.name", "data.tokenizer"} else old_code
    dataset = prepare.prepare_dataset_of_config(settings, fallback=False, code=data_code)

    print(f"repeats     {old.path}", flush=True)
    if not print_differences(list_differences(old, text, settings, dataset, scheduler)):
        machine = "source and versions" if scheduler else "source, versions, and machine"
        print(f"same        settings, {machine}", flush=True)
    dataset.verify_checksums()
    new = create_rerun_folder(old, text, settings, dataset, overridden=overridden)
    exit_status = run_on_cluster(new, settings, text, profile, scheduler) if scheduler else run_locally(new, settings)
    if new.result.get("state") != "finished":
        print(f"the new run did not finish; see {new.path}", file=sys.stderr)
        return exit_status or 1
    print_differences(compare_worlds(old, new))
    return 0 if compare_runs(old, new) else DIFFERENT
