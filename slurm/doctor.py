"""`make doctor`: looks at every host before a long job, and names the one that is not sound.

python -m slurm.doctor [--nodes=N] [--launch=auto|local|slurm] [--cluster=PROFILE]
python -m slurm.doctor look [FOLDER]          one process of it, started by srun or by ourselves
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from common import config
from common.config import ROOT, UserError
from slurm import sbatch
from slurm.scheduler import Scheduler, choose, scrubbed
from slurm.submit import checked_nodes


def table(facts: list[dict[str, object]]) -> str:
    """One line a process."""
    names = ("rank", "host", "address", "device", "cores", "memory_free_gb", "disk_free_gb", "all_reduce_gb_per_s")
    rows = [list(names), *[["-" if f.get(n) is None else str(f[n]) for n in names] for f in facts]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def look(folder: Path, nodes: int) -> int:
    """Be one of the processes that look; returns the exit status."""
    from common import checkup, launch, processes
    from configs.shared import Launch

    def body(place: launch.Place) -> None:
        with launch.group(place, Launch()) as world:
            mine = checkup.short(world, folder) | checkup.all_reduce(world)
            facts = world.gather(mine)
            if world.is_main:
                print(table(facts), flush=True)
                wrong = checkup.problems(facts, len(set(world.hosts)))
                if wrong:
                    raise UserError("; ".join(wrong))

    place = launch.outside(os.environ)
    if place is None:
        return processes.fork_all(body, nodes, nodes, lambda: None)
    body(place)
    return 0


def send(scheduler: Scheduler, nodes: int, profile_name: str) -> int:
    """Look from `nodes` hosts of a cluster; returns the exit status."""
    profile = sbatch.load_profile(profile_name, [])
    scheduler.check(nodes, profile.partition)
    words = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={profile.per_node}", f"--cpus-per-task={profile.cpus}"]
    words += ["--kill-on-bad-exit=1", "--time=10", "--job-name=doctor"]
    for key in ("partition", "account", "qos", "constraint", "exclude"):
        if getattr(profile, key):
            words.append(f"--{key}={getattr(profile, key)}")
    if profile.gpus:
        words.append(f"--{profile.gpus_as}={'gpu:' if profile.gpus_as == 'gres' else ''}{profile.gpus}")
    command = scheduler.command(*words, sys.executable, "-m", "slurm.doctor", "look", "runs")
    return subprocess.run(command, env=scrubbed(os.environ) | {"PYTHONPATH": str(ROOT)}, check=False).returncode


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make doctor")
    parser.add_argument("verb", nargs="?", default="send", choices=("send", "look"))
    parser.add_argument("folder", nargs="?", default="runs")
    for option in ("nodes", "launch", "cluster"):
        parser.add_argument(f"--{option}", default="")
    given = parser.parse_args(arguments)
    nodes = checked_nodes(given.nodes or "1")
    if given.verb == "look":
        return look(Path(given.folder), nodes)
    scheduler = choose(given.launch or "auto")
    if scheduler is None:
        print(f"no SLURM is used: {nodes} processes on this machine", flush=True)
        status = look(Path(given.folder), nodes)
    else:
        status = send(scheduler, nodes, given.cluster or "default")
    print("all is sound" if status == 0 else "not sound", flush=True)
    return status


if __name__ == "__main__":
    with config.user_errors():
        sys.exit(main(sys.argv[1:]))
