"""The `doctor` command: check all hosts before a long job, or diagnose a run that failed or hangs.

The command itself does not import torch. To check hosts, the command starts ranks that execute this module:

    python -m slurm.reports.doctor NODES [key=value ...]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from common.config import config
from common.config.command_line import parse_command_line
from common.config.config import ROOT
from common.runs.compare.compare_table import Column, join_columns
from common.system.errors import UserError, exit_on_user_error
from common.system.text import format_count
from configs.profile import Profile
from configs.shared import Experiment, TrainingExperiment
from slurm.arguments import parse_count, parse_zero_or_one, split_experiment_and_cluster_settings
from slurm.reports import diagnosis, selection
from slurm.scheduling import sbatch
from slurm.scheduling.scheduler import Scheduler, choose_scheduler, remove_launcher_variables

COLUMNS = (
    "rank", "host", "address", "device", "cores", "memory_free_gb", "disk_free_gb", "disk_mb_per_s", "gflop_per_s",
    "all_reduce_gb_per_s",
)  # fmt: skip
"""Facts that the table of hosts shows for each rank, in the order of the columns."""
USED_SETTINGS = ("runs", "data.cache", "launch.device", "launch.interface", "launch.mixed")
"""Settings that ARGS may contain."""
HOST_MARK = "doctor-here "  # prefix of the line in which a rank prints the name of its host
FACTS_MARK = "doctor-found "  # prefix of the line in which rank 0 prints the report about all ranks
SETUP_TIMEOUT = 120.0  # seconds for all ranks to connect; importing torch can take a minute on a busy host
QUEUE_CHECK_SECONDS = 5.0  # time after which a running job's hosts are read from SLURM
REPORT_TIMEOUT = 240.0  # maximum time in seconds until all ranks have exited
HOST_FAILURE = re.compile(
    r"(?:on node |node failure on )(\S+?)(?: failed)?: (.+)|nodes? (\S+) (?:not responding|is down)", re.I
)
"""Messages of srun about a failed host. The groups are host and problem, or only the host."""


def format_host_table(facts: Sequence[dict[str, Any]]) -> str:
    """Return the table of hosts as text, with one line per rank."""
    columns = []
    for name in COLUMNS:
        cells = ["-" if rank.get(name) is None else str(rank[name]) for rank in facts]
        columns.append(Column(name, cells, is_left_aligned=True))
    return "\n".join(join_columns(columns))


# ---- functions that run on the hosts


def check_this_host(nodes: int, settings: DoctorSettings) -> int:
    """Check this rank's host together with the other ranks, and return the exit status.

    Without SLURM, this process starts `nodes` ranks on this machine.
    """
    print(f"{HOST_MARK}{socket.gethostname()}", flush=True)
    from common.ranks import local_launcher, rendezvous
    from common.ranks.rank_info import RankInfo, read_rank_info
    from common.runs.tracking import wandb_account
    from common.training import host_checks

    launch = dataclasses.replace(settings.launch, setup_timeout=SETUP_TIMEOUT, step_timeout=SETUP_TIMEOUT)

    def collect_and_print_report(rank_info: RankInfo) -> None:
        """Collect the facts of all ranks, and print the report on rank 0."""
        with rendezvous.join_world(rank_info, launch) as world:
            facts = host_checks.collect_all_host_facts(world, Path(settings.runs), Path(settings.data.cache))
            hosts = world.gather(facts)
            if world.is_main:
                problems = host_checks.find_problems(hosts, len(set(world.hosts)), mixed=launch.mixed)

                mode = wandb_account.read_requested_mode(Experiment())
                reason = ""
                if mode != "disabled":
                    mode, reason = wandb_account.choose_mode(mode)
                report = {"hosts": hosts, "problems": problems, "wandb": {"mode": mode, "reason": reason}}
                print(FACTS_MARK + json.dumps(report), flush=True)

    rank_info = read_rank_info(os.environ)
    if rank_info is None:
        return local_launcher.run_ranks(collect_and_print_report, nodes, nodes, lambda: None)
    collect_and_print_report(rank_info)
    return 0


# ---- functions that run on the user's machine


def make_srun_command(profile: Profile, nodes: int, job_name: str) -> list[str]:
    """Return the srun command that starts ranks on `nodes` hosts. The command of a rank must follow it."""
    options: dict[str, object] = {
        "nodes": nodes,
        "ntasks-per-node": profile.ranks_per_node,
        "cpus-per-task": profile.cpus,
        "kill-on-bad-exit": 1,
        "time": 10,
        "job-name": job_name,
    }
    options |= sbatch.make_resource_options(profile)
    srun = ["srun", *(f"--{option}={value}" for option, value in options.items()), *profile.container]
    if profile.setup and not profile.container:  # a job runs these commands outside the container
        srun += ["bash", "-c", "\n".join([*profile.setup, 'exec "$@"']), "bash"]
    return srun


def describe_down_hosts(scheduler: Scheduler, nodes: int, partition: str) -> list[str]:
    """Return one line per host that SLURM reports as unavailable, with the reason.

    Returns an empty list if at least `nodes` hosts are available.
    """
    options = [f"--partition={partition}"] if partition else []
    # Each line contains host, state and reason. sinfo repeats a host for each of its partitions.
    lines = set(scheduler.run_command("sinfo", "-N", "-h", "-o", "%N|%T|%E", *options).split("\n")) - {""}
    down = [line for line in sorted(lines) if re.match(r"[^|]*\|(down|drain|fail|unknown|\w+\*)", line)]
    hosts = {line.partition("|")[0] for line in lines}
    if len(hosts) - len(down) >= nodes:
        return []
    problems = []
    for line in down:
        host, state, reason = line.split("|", 2)
        problems.append(f"{host} is {state}: {reason.strip()}; SLURM does not start jobs on this host")
    return problems


def list_job_hosts(scheduler: Scheduler, job_name: str) -> list[str]:
    """Return the hosts that SLURM has allocated to a job.

    Returns an empty list if the job has no hosts yet or a SLURM command fails.
    """
    with contextlib.suppress(UserError):
        names = scheduler.run_command("squeue", "-h", f"--name={job_name}", "-o", "%N").split()
        return scheduler.run_command("scontrol", "show", "hostnames", names[0]).split() if names else []
    return []


def end_check(process: subprocess.Popen[str], scheduler: Scheduler | None, job_name: str) -> None:
    """Cancel the job that checks the hosts, and end the process that waits for it."""
    if scheduler is not None:
        with contextlib.suppress(UserError):
            scheduler.run_command("scancel", f"--name={job_name}")
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()


def run_ranks_and_read_report(command: list[str], scheduler: Scheduler | None, job_name: str) -> dict[str, Any]:
    """Run the command that starts the ranks, and return the report that rank 0 prints.

    If rank 0 prints no report, the entry `problems` of the returned dict explains why.
    """
    environment = remove_launcher_variables(os.environ) | {"PYTHONPATH": str(ROOT)}
    lines: list[str] = []
    hosts: list[str] = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        # A thread reads the output, so that this process can stop waiting for a host that does not respond.
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            reader.join(QUEUE_CHECK_SECONDS)
            if reader.is_alive() and scheduler is not None:
                hosts = list_job_hosts(scheduler, job_name)
            reader.join(REPORT_TIMEOUT)
        except KeyboardInterrupt:  # srun ignores the first Ctrl-C
            end_check(process, scheduler, job_name)
            raise
        has_timed_out = reader.is_alive()
        if has_timed_out:
            if scheduler is not None:
                hosts = hosts or list_job_hosts(scheduler, job_name)
            end_check(process, scheduler, job_name)

    for line in lines:
        if line.startswith(FACTS_MARK):
            return dict(json.loads(line.removeprefix(FACTS_MARK)))
    return {"hosts": [], "wandb": {}, "problems": explain_missing_report(lines, hosts, has_timed_out)}


def explain_missing_report(lines: list[str], hosts: list[str], has_timed_out: bool) -> list[str]:
    """Return the reasons why the ranks printed no report.

    There is one reason for each host that failed or does not respond. If there is no such host, the reasons are the
    error messages or the last lines of the ranks' output `lines`.
    """
    reporting = [line.removeprefix(HOST_MARK).strip() for line in lines if line.startswith(HOST_MARK)]
    problems = {}
    for match in filter(None, map(HOST_FAILURE.search, lines)):
        problems[match[1] or match[3]] = (match[2] or "does not respond").strip()
    for host in hosts:
        if host not in reporting:
            problems.setdefault(host, "does not respond; check the network cable and the slurmd of this host")

    if problems:
        return [f"{host}: {problem}" for host, problem in problems.items()]
    if has_timed_out and not reporting:
        return [f"no host became available within {REPORT_TIMEOUT:g} s; try again later"]
    errors = [line.strip().removeprefix("error: ") for line in lines if "error: " in line]
    last_lines = [line.strip() for line in lines[-3:]]
    return list(dict.fromkeys(errors))[:3] or last_lines or ["the ranks exited without an error message"]


def check_nodes(scheduler: Scheduler | None, nodes: int, profile: Profile, settings: DoctorSettings) -> dict[str, Any]:
    """Check `nodes` hosts of a cluster, and return a report.

    Without SLURM, `nodes` ranks check this machine. Raises UserError if the cluster has too few hosts or does not
    answer.
    """
    command = [sys.executable, "-m", "slurm.reports.doctor", str(nodes)]
    command += [f"runs={Path(settings.runs).absolute()}", f"data.cache={Path(settings.data.cache).absolute()}"]
    command += [f"launch.interface={settings.launch.interface}", f"launch.mixed={str(settings.launch.mixed).lower()}"]
    command.append(f"launch.device={settings.launch.device}")
    if scheduler is None:
        return run_ranks_and_read_report(command, None, "")

    scheduler.check_enough_hosts(nodes, profile.partition)
    problems = describe_down_hosts(scheduler, nodes, profile.partition)
    if problems:
        return {"hosts": [], "wandb": {}, "problems": problems}

    job_name = f"doctor-{secrets.token_hex(3)}"
    srun = make_srun_command(profile, nodes, job_name)
    return run_ranks_and_read_report(scheduler.build_command(*srun, *command), scheduler, job_name)


def print_host_report(report: dict[str, Any]) -> None:
    """Print the table of hosts, the W&B mode of new runs, and the problems."""
    if report["hosts"]:
        print(format_host_table(report["hosts"]))
    wandb = report["wandb"]
    if wandb:
        print(f"W&B mode of new runs: {wandb['mode']} ({wandb['reason']})".removesuffix(" ()"))
    problems = report["problems"]
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{format_count(len(problems), 'problem')} found" if problems else "all checks passed", flush=True)


def main(args: argparse.Namespace) -> int:
    """Check hosts or diagnose a run, and return the exit status.

    Raises UserError for invalid arguments.
    """
    as_json = parse_zero_or_one("JSON", args.json)
    if args.run is not None:
        for name in ("nodes", "args", "launch", "cluster"):
            if getattr(args, name):
                raise UserError(f"RUN diagnoses a run, but {name.upper()} applies to checks of hosts; omit one of them")
        return diagnosis.print_diagnosis(selection.find_run(args.run, Path("runs")), as_json)

    nodes = parse_count("NODES", args.nodes or "1")
    settings_arguments, profile_arguments = split_experiment_and_cluster_settings(args.args)
    values = parse_command_line(settings_arguments).values
    settings = config.build_config(DoctorSettings, [values])
    ignored = [name for name in values if name not in USED_SETTINGS]
    if ignored:
        raise UserError(
            f"ARGS: doctor does not use {', '.join(ignored)}; use only {', '.join(USED_SETTINGS)} and cluster.key=value"
        )
    profile = sbatch.load_profile(args.cluster or "default", profile_arguments)
    scheduler = choose_scheduler(args.launch or "auto")
    if scheduler is None and not as_json:
        print(f"SLURM is not used; checking {format_count(nodes, 'rank')} on this machine", flush=True)
    report = check_nodes(scheduler, nodes, profile, settings)
    if as_json:
        print(json.dumps({"sound": not report["problems"]} | report, indent=2))
    else:
        print_host_report(report)
    return 1 if report["problems"] else 0


class DoctorSettings(TrainingExperiment):
    """Settings of the doctor command, of which only USED_SETTINGS have an effect."""

    can_mix_devices: ClassVar[bool] = True

    @property
    def processes(self) -> int:
        return 1


if __name__ == "__main__":  # executed by each rank, which srun or the doctor command has started
    with exit_on_user_error():
        node_count, *rank_arguments = sys.argv[1:]
        rank_values = parse_command_line(rank_arguments).values
        sys.exit(check_this_host(int(node_count), config.build_config(DoctorSettings, [rank_values])))
