"""The verb `doctor`: check every host before a long job, or a run that failed or hangs. Imports no torch itself.

python -m slurm.reports.doctor NODES RUNS CACHE [mixed]      one of its ranks on the hosts
"""

from __future__ import annotations

import argparse
import contextlib
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

from common.core import config
from common.core.config import ROOT
from common.core.errors import UserError, exit_on_user_error
from common.core.text import format_count
from configs.profile import Profile
from configs.shared import Experiment
from slurm.arguments import parse_count, parse_switch, split_settings
from slurm.reports import diagnosis, selection
from slurm.scheduling import sbatch
from slurm.scheduling.scheduler import Scheduler, choose_scheduler, clean_environment

COLUMNS = (
    "rank", "host", "address", "device", "cores", "memory_free_gb", "disk_free_gb", "disk_mb_per_s", "gflop_per_s",
    "all_reduce_gb_per_s",
)  # fmt: skip
USED_SETTINGS = ("runs", "data.cache", "launch.mixed")
HERE, FOUND = "doctor-here ", "doctor-found "  # how the ranks on the hosts begin what they report
SETUP = 120.0  # seconds until all have met: importing torch takes a minute on a busy host
PATIENCE = 240.0  # seconds until they have reported
UNABLE = re.compile(
    r"(?:on node |node failure on )(\S+?)(?: failed)?: (.+)|nodes? (\S+) (?:not responding|is down)", re.I
)


def format_table(facts: Sequence[dict[str, Any]]) -> str:
    """Format the table of hosts as text: one line per rank."""
    rows = [list(COLUMNS), *[["-" if f.get(n) is None else str(f[n]) for n in COLUMNS] for f in facts]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


# ---- on the hosts


def examine_this_host(nodes: int, runs: Path, cache: Path, *, mixed: bool) -> int:
    """Examine the host of this rank with the others, whose devices may be others with `mixed`; return exit status."""
    print(f"{HERE}{socket.gethostname()}", flush=True)
    from common.distributed import local_launcher, rendezvous
    from common.distributed.rank_info import RankInfo, read_rank_info
    from common.runs import wandb_account
    from common.training import host_checks
    from configs.launch import Launch

    def examine_rank(rank_info: RankInfo) -> None:
        launch = Launch(setup_timeout=SETUP, step_timeout=SETUP, mixed=mixed)
        with rendezvous.joined_world(rank_info, launch) as world:
            facts = world.gather(host_checks.collect_thorough_facts(world, runs, cache))
            if world.is_main:
                wrong = host_checks.find_problems(facts, len(set(world.hosts)), mixed=mixed)
                asked = wandb_account.read_requested_mode(Experiment())
                mode, why = (asked, "") if asked == "disabled" else wandb_account.choose_mode(asked)
                found = {"hosts": facts, "problems": wrong, "wandb": {"mode": mode, "reason": why}}
                print(FOUND + json.dumps(found), flush=True)

    rank_info = read_rank_info(os.environ)
    if rank_info is None:
        return local_launcher.run_ranks(examine_rank, nodes, nodes, lambda: None)
    examine_rank(rank_info)
    return 0


# ---- here


def make_srun_command(profile: Profile, nodes: int, name: str) -> list[str]:
    """Make the srun command that starts ranks on so many hosts."""
    words = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks-per-node={profile.ranks_per_node}",
        f"--cpus-per-task={profile.cpus}",
    ]
    words += ["--kill-on-bad-exit=1", "--time=10", f"--job-name={name}"]
    return words + [f"--{key}={value}" for key, value in sbatch.choose_host_options(profile).items()]


def list_down_hosts(scheduler: Scheduler, nodes: int, partition: str) -> list[str]:
    """List hosts that SLURM reports as down, where too few others are left."""
    chosen = [f"--partition={partition}"] if partition else []
    lines = sorted(set(scheduler.call("sinfo", "-N", "-h", "-o", "%N|%T|%E", *chosen).split("\n")) - {""})
    bad = [line.split("|", 2) for line in lines if re.match(r"[^|]*\|(down|drain|fail|unknown|\w+\*)", line)]
    if len({line.partition("|")[0] for line in lines}) - len(bad) >= nodes:
        return []
    return [f"{host} is {state}: {reason.strip()}; SLURM starts nothing there" for host, state, reason in bad]


def list_job_hosts(scheduler: Scheduler, name: str) -> list[str]:
    """List the hosts that a job was given."""
    with contextlib.suppress(UserError):
        names = scheduler.call("squeue", "-h", f"--name={name}", "-o", "%N").split()
        return scheduler.call("scontrol", "show", "hostnames", names[0]).split() if names else []
    return []


def run_examination(command: list[str], scheduler: Scheduler | None, name: str) -> dict[str, Any]:
    """Run the ranks on the hosts; returns their facts, or in `problems` why there are none."""
    env = clean_environment(os.environ) | {"PYTHONPATH": str(ROOT)}
    lines: list[str] = []
    hosts: list[str] = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None

        def read_lines() -> None:
            lines.extend(process.stdout or ())

        reader = threading.Thread(target=read_lines, daemon=True)
        reader.start()
        reader.join(5.0)
        if reader.is_alive() and scheduler is not None:
            hosts = list_job_hosts(scheduler, name)
        reader.join(PATIENCE)
        late = reader.is_alive()
        if late and scheduler is not None:
            hosts = hosts or list_job_hosts(scheduler, name)
            with contextlib.suppress(UserError):
                scheduler.call("scancel", f"--name={name}")
        if late:
            process.terminate()
            reader.join(5)
            process.kill()
    found = next((line.removeprefix(FOUND) for line in lines if line.startswith(FOUND)), None)
    if found:
        return dict(json.loads(found))
    return {"hosts": [], "wandb": {}, "problems": explain_missing_facts(lines, hosts, late)}


def explain_missing_facts(lines: list[str], hosts: list[str], late: bool) -> list[str]:
    """List reasons for missing facts: hosts without a rank, and the errors of the others."""
    here = [line.removeprefix(HERE).strip() for line in lines if line.startswith(HERE)]
    named = [match for match in map(UNABLE.search, lines) if match]
    wrong = {str(m[1] or m[3]): (m[2] or "it does not answer").strip() for m in named}
    missing = [host for host in hosts if host not in here and host not in wrong]
    wrong |= dict.fromkeys(missing, "it does not answer; is its cable in, its slurmd up?")
    if wrong:
        return [f"{host}: {why}" for host, why in wrong.items()]
    said = [line.strip().removeprefix("error: ") for line in lines if "error: " in line]
    if late and not here:
        return [f"no host was free within {PATIENCE:g} s; try later"]
    return said[:3] or [line.strip() for line in lines[-3:]] or ["the ranks there ended without an error message"]


def examine_hosts(scheduler: Scheduler | None, nodes: int, profile: Profile, settings: Experiment) -> dict[str, Any]:
    """Examine so many hosts of a cluster, or as many ranks on this machine. Raises UserError."""
    folders = [str(Path(path).absolute()) for path in (settings.runs, settings.data.cache)]
    words = [str(nodes), *folders, *(["mixed"] if settings.launch.mixed else [])]
    command = [sys.executable, "-m", "slurm.reports.doctor", *words]
    if scheduler is None:
        return run_examination(command, None, "")
    scheduler.check_enough_hosts(nodes, profile.partition)
    wrong = list_down_hosts(scheduler, nodes, profile.partition)
    if wrong:
        return {"hosts": [], "wandb": {}, "problems": wrong}
    name = f"doctor-{secrets.token_hex(3)}"
    srun = make_srun_command(profile, nodes, name)
    return run_examination(scheduler.build_command(*srun, *command), scheduler, name)


def print_facts(found: dict[str, Any]) -> None:
    """Print the table of hosts, where W&B would be reached, and the problems."""
    if found["hosts"]:
        print(format_table(found["hosts"]))
    if found["wandb"]:
        why = found["wandb"]["reason"]
        print(f"W&B: runs would be {found['wandb']['mode']}" + (f" ({why})" if why else ""))
    for problem in found["problems"]:
        print(f"problem: {problem}")
    print("not sound" if found["problems"] else "all is sound", flush=True)


def main(given: argparse.Namespace) -> int:
    """Check hosts, or examine a run; returns the exit status. Raises UserError."""
    as_json = parse_switch("JSON", given.json)
    if given.run is not None:
        others = [name for name in ("nodes", "args", "launch", "cluster") if getattr(given, name)]
        if others:
            raise UserError(f"RUN examines a run, and {others[0].upper()} is for checking hosts; leave one of them out")
        return diagnosis.print_diagnosis(selection.find_run(given.run, Path("runs")), as_json)
    nodes = parse_count("NODES", given.nodes or "1")
    words, for_profile = split_settings(given.args)
    asked = config.parse_command_line(words).values
    settings = config.build_config(FolderSettings, [asked])
    ignored = [name for name in asked if name not in USED_SETTINGS]
    if ignored:
        raise UserError(
            f"ARGS: doctor does not use {', '.join(ignored)}, only {', '.join(USED_SETTINGS)} and cluster.key=value"
        )
    profile = sbatch.load_profile(given.cluster or "default", for_profile)
    scheduler = choose_scheduler(given.launch or "auto")
    if scheduler is None and not as_json:
        print(f"no SLURM is used: {format_count(nodes, 'rank')} on this machine", flush=True)
    found = examine_hosts(scheduler, nodes, profile, settings)
    if as_json:
        print(json.dumps({"sound": not found["problems"]} | found, indent=2))
    else:
        print_facts(found)
    return 1 if found["problems"] else 0


class FolderSettings(Experiment):
    """The settings that every experiment has: folders of runs and data, and whether devices are mixed."""

    joins_devices: ClassVar[bool] = True

    @property
    def processes(self) -> int:
        return 1


if __name__ == "__main__":  # a rank on a host, started by srun or by the doctor itself
    with exit_on_user_error():
        count, where, kept, *more = sys.argv[1:]
        sys.exit(examine_this_host(int(count), Path(where), Path(kept), mixed=more == ["mixed"]))
