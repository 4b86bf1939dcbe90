"""The verb `rerun`: repeat a run from its own settings and source in a new run folder, and compare. Imports no torch.

Before the start it prints what differs from the first time: settings, packages, machine, ranks, data. At the end it
prints whether losses and final numbers, except times and memory, are equal to the bit, or how far apart. Exit status:
0 equal, 3 different, 2 refused; a repetition that does not finish has its own.
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

from common.core import config, config_keys
from common.core.errors import UserError
from common.data import prepare
from common.data.prepare import Prepared
from common.distributed.transport import algorithms
from common.pipeline import schedules
from common.runs import provenance, result
from common.runs.folder import Folder, disk_errors
from common.training.optimization import own_files
from configs.profile import Profile
from configs.shared import Experiment
from slurm.arguments import split_settings
from slurm.launch import submit
from slurm.reports import logs, selection, status
from slurm.scheduling import sbatch
from slurm.scheduling.entry_points import find_entry_points
from slurm.scheduling.scheduler import Scheduler, choose_scheduler

DIFFERENT = 3  # exit status
OWN_FUNCTIONS = ("schedule", "launch.algorithm", "data.name", "optim.name", "optim.decay")
"""Settings that may name one, whose file a run keeps."""
PLACES = ("runs", "data.root", "data.cache")  # where things lie changes no number
Lines = Iterator[tuple[str, Any, Any]]


def find_repeatable_run(run: str) -> Folder:
    """Find the folder of a run that is over and can be repeated. Raises UserError."""
    folder = selection.find_run(run, Path("runs"))
    state, _ = status.read_state(folder)
    if state not in status.OVER:
        raise UserError(f"{folder.path.name} is {state}; repeat it when it is over: make status RUN={run} WAIT=600")
    if not (folder.path / "code" / "experiments" / f"{folder.experiment}.py").is_file():
        raise UserError(f"{folder.path} has no source in code/ any more, and cannot be repeated; start a new run")
    provenance.check_source(folder)
    unknown = result.describe_unknown_format(folder.result)
    if unknown:
        raise UserError(f"{folder.path.name} cannot be compared with: {unknown}")
    changed = config.read_changes_of_attempts(folder.path)
    if changed:
        raise UserError(
            f"{folder.path.name} was resumed with other settings ({config.describe_changes(changed)}), "
            "and no single run repeats that; start a new run with the settings that you want"
        )
    return folder


def resolve_settings(old: Folder, words: list[str]) -> str:
    """Return the settings as YAML, checked by the run's own source: keys may have come and gone. Raises UserError."""
    arguments = ["--config", str(old.path / "config.yaml"), *words, "--print-config"]
    given = [f"--args={shlex.join(arguments)}", "--", old.experiment]
    command = [sys.executable, "-m", *find_entry_points(old).submit, *given]
    done = subprocess.run(command, env=submit.make_source_environment(old), capture_output=True, text=True, check=False)
    if done.returncode:
        problem = done.stderr.strip().splitlines() or ["its own source cannot be imported"]
        raise UserError(problem[-1].removeprefix("error: "))
    return done.stdout


def parse_settings_text(text: str) -> dict[str, Any]:
    """Read the settings of a YAML text, by dotted name, as text."""
    return config.flatten_mapping(yaml.load(text, Loader=config.LOADER) or {})  # noqa: S506 (it builds only str, list, dict)


def read_known_settings(name: str, text: str) -> Experiment:
    """Read the settings whose keys today's source knows."""
    schema = config.import_schema(name)
    known = config_keys.list_keys(schema)
    return config.build_config(
        schema, [{key: value for key, value in parse_settings_text(text).items() if key in known}]
    )


def create_folder(
    old: Folder, text: str, settings: Experiment, found: Prepared, *, named: Container[str] = ()
) -> Folder:
    """Make a new run folder with the old run's source; files of own functions whose settings are `named` are new."""
    new = Folder.create(Path(settings.runs), old.experiment, text)
    with submit.remove_folder_on_error(new):
        with disk_errors(new.path):
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(old.path / "code", new.path / "code", ignore=leave)
        found.copy_own_data_file(new.path / "code")
        schedules.copy_schedule_file(settings, new.path / "code", anew="schedule" in named)
        algorithms.copy_algorithm_file(settings.launch, new.path / "code", anew="launch.algorithm" in named)
        own_files.copy_optimizer_files(settings.optim, new.path / "code", anew=named)
        provenance.write_metadata(new, ["make", "rerun", f"RUN={old.path.name}"], found.to_dict())
        provenance.update_metadata(new, git=provenance.read_metadata(old).get("git"), repeats=old.path.name)
    return new


# ---- before it starts


def list_differences(
    old: Folder, text: str, settings: Experiment, found: Prepared, scheduler: Scheduler | None
) -> Lines:
    """List what differs from the first time: name, value then, value now."""
    then, now = parse_settings_text((old.path / "config.yaml").read_text()), parse_settings_text(text)
    for key in now | then:
        if key not in PLACES and then.get(key) != now.get(key):
            yield key, then.get(key), now.get(key)
    meta = provenance.read_metadata(old)
    for package in provenance.PACKAGES:
        yield f"package {package}", (meta.get("packages") or {}).get(package), provenance.read_package_version(package)
    yield "python", meta.get("python"), platform.python_version()
    world, machine = meta.get("world") or {}, meta.get("machine") or {}
    yield "ranks", world.get("processes"), settings.processes
    if scheduler is None and world.get("launched_by") == "local":  # else nobody knows the hosts before
        yield "cpu", machine.get("cpu"), provenance.read_cpu_model()
        if settings.launch.threads == 0:
            yield "cores", machine.get("cores"), len(os.sched_getaffinity(0))
        there = provenance.count_visible_gpus() > 0 and not settings.launch.on_cpu
        yield "device", "cpu" if world.get("device") == "cpu" else "gpu", "gpu" if there else "cpu"
    for part, known in ((meta.get("data") or {}).get("sha256") or {}).items():
        file = found.path / f"{part}.npy"
        yield f"data {part} of {found.name} (sha256 of {file})", known[:16], prepare.hash_file(file)[:16]


def print_differences(lines: Lines) -> int:
    """Print the lines that differ; returns how many."""
    count = 0
    for name, before, after in lines:
        if before is not None and before != after:
            print(f"differs     {name}: then {before}, now {after}", flush=True)
            count += 1
    return count


# ---- running


def run_locally(new: Folder, settings: Experiment) -> int:
    """Run on this machine to the end; returns the exit status."""
    submit.print_simulated_hosts(settings)
    with subprocess.Popen(submit.make_resume_command(new), env=submit.make_source_environment(new)) as run:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it hears Ctrl-C itself, and saves
        signal.signal(signal.SIGTERM, lambda number, frame: run.send_signal(number))
        return run.wait()


def run_on_cluster(new: Folder, settings: Experiment, text: str, profile: Profile, scheduler: Scheduler) -> int:
    """Run on a cluster, followed to the end; returns the exit status."""
    with submit.remove_folder_on_error(new):
        job = submit.submit_folder(new, settings, text, profile, scheduler)
    submit.print_job(new, settings, job, scheduler)
    return logs.follow_log(new, logs.find_rank_0_log(new))


# ---- after it


def read_losses(folder: Folder) -> dict[int, float | None]:
    """Read the loss of each step; None for one that is no number."""
    return {row["global_step"]: row["loss"] for row in folder.read_rows() if "loss" in row}


def compute_distance(a: Any, b: Any) -> float:
    """Return |a - b| for two numbers; otherwise 0 if they are equal, else infinity."""
    both = isinstance(a, int | float) and isinstance(b, int | float)
    return float(abs(a - b)) if both else 0.0 if a == b else math.inf


def compare_runs(old: Folder, new: Folder) -> bool:
    """Print that two runs are equal to the bit, or how far apart; returns True where they are equal."""
    then, now = read_losses(old), read_losses(new)
    both = [step for step in then if step in now]
    gaps = {step: compute_distance(then[step], now[step]) for step in both}
    wrong = [step for step in both if gaps[step]]
    finished = old.result.get("state") == "finished"
    known = bool(both) or (finished and not then and not now)  # a measurement has no losses
    missing = len(then) - len(both) + (len(now) - len(both) if finished else 0)
    if wrong:
        far = max(wrong, key=lambda step: gaps[step])
        count = f"{len(wrong)} of {len(both)} steps"
        print(f"losses      differ in {count}, first in step {wrong[0]}, by at most {gaps[far]:.3g} (step {far})")
    elif both:
        print(f"losses      equal to the bit in {len(both)} steps")
    if missing or not known:
        print(f"losses      {len(then)} steps then, {len(now)} now")
    if not finished:
        print(f"result      the run that was repeated did not finish ({old.result.get('state', 'no result')})")
        return bool(both) and not wrong and not missing
    a, b = (result.parse_result(folder.result).select_repeatable() for folder in (old, new))  # speed does not count
    odd = [key for key in a | b if a.get(key) != b.get(key)]
    for key in odd:
        gap = compute_distance(a.get(key), b.get(key))
        words = f", {gap:.3g} apart" if gap < math.inf else ""
        print(f"result      {key}: then {a.get(key)}, now {b.get(key)}{words}")
    if not odd:
        print(f"result      equal to the bit: {', '.join(a)}")
    return known and not wrong and not missing and not odd


def list_world_differences(old: Folder, new: Folder) -> Lines:
    """List what is known only after the ranks have met."""
    then, now = (provenance.read_metadata(folder).get("world") or {} for folder in (old, new))
    for key in ("launched_by", "nodes", "device", "backend", "threads"):
        yield key, then.get(key), now.get(key)


def find_profile(old: Folder, cluster: str, words: list[str]) -> Profile:
    """Find the cluster's profile: the one that is named, else the run's own, else the default; `words` on top of it."""
    job: Mapping[str, Any] = provenance.read_metadata(old).get("job") or {}
    known = {key: value for key, value in (job.get("profile") or {}).items() if key in vars(Profile())}
    if cluster or not known:
        return sbatch.load_profile(cluster or "default", words)
    return sbatch.make_profile(parse_settings_text(yaml.safe_dump(known)), words)


def main(given: argparse.Namespace) -> int:
    """Repeat a run; returns the exit status."""
    old = find_repeatable_run(given.run)
    words, for_profile = split_settings(given.args)
    profile = find_profile(old, given.cluster, for_profile)
    scheduler = choose_scheduler(given.launch or "auto")
    text = resolve_settings(old, [f"runs={old.path.parent}", *words])
    settings = read_known_settings(old.experiment, text)
    if scheduler is not None:  # the job starts in another folder
        absolute = [f"{key}={Path(path).absolute()}" for key, path in settings.list_paths().items()]
        text = resolve_settings(old, words + absolute)
        settings = read_known_settings(old.experiment, text)
        submit.check_step_timeout(settings, profile)
        scheduler.check_enough_hosts(settings.launch.nodes, profile.partition)
    named = config.parse_command_line(words).values
    kept = {key: None if key in named else old.path / "code" for key in OWN_FUNCTIONS}
    schedules.check_schedule_of_config(settings, kept["schedule"])
    algorithms.check_algorithm_of_config(settings, kept["launch.algorithm"])
    own_files.check_files_of_config(settings.optim, old.path / "code", named)
    found = prepare.prepare_dataset(settings.data, fallback=False, log=settings.log, code=kept["data.name"])
    prepare.check_model_fits_data(settings, found)
    print(f"repeats     {old.path}", flush=True)
    if not print_differences(list_differences(old, text, settings, found, scheduler)):
        known = "source and versions" if scheduler else "source, versions and machine"  # a job's hosts are not
        print(f"same        settings, {known}", flush=True)
    found.verify_checksums()
    new = create_folder(old, text, settings, found, named=named)
    code = run_on_cluster(new, settings, text, profile, scheduler) if scheduler else run_locally(new, settings)
    if new.result.get("state") != "finished":
        print(f"the repetition did not finish; see {new.path}", file=sys.stderr)
        return code or 1
    print_differences(list_world_differences(old, new))
    return 0 if compare_runs(old, new) else DIFFERENT
