"""Functions for finding a running local cluster and for running programs inside the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.system.errors import UserError
from common.system.processes import Process
from slurm.local_cluster import daemons, slurm_conf
from slurm.local_cluster.namespaces import run_in_namespaces
from slurm.local_cluster.slurm_conf import Plan

DEFAULT_NAME = "local"


@dataclass(frozen=True)
class Cluster:
    """A running local cluster."""

    plan: Plan
    process: Process
    """First process of the cluster. When this process ends, all other processes of the cluster end."""

    def build_command(self, argv: Sequence[str], node: int = 0, cwd: str | Path = "") -> list[str]:
        """Return the command that executes `argv` inside the cluster as the calling user.

        `node` is the number of a host, or 0 for the controller. By default, `cwd` is the current folder.
        """
        namespaces = ["--net", "--uts", "--mount", "--pid", "--"]
        user = ["--user", "--preserve-credentials"] if self.plan.uid else []
        prefix = ["nsenter", f"--target={self.process.pid}", *user, *namespaces]
        if node:
            pid = daemons.locate_host_process_record(self.plan, node).read_text().split()[0]
            prefix += ["nsenter", f"--target={pid}", *namespaces]
        variables = [f"{key}={value}" for key, value in self.plan.environment.items()]
        # env changes the folder last, because nsenter starts in the root folder of the entered mount namespace.
        env = ["env", f"--chdir={cwd or Path.cwd()}", *variables]
        return [*prefix, *daemons.make_caller_prefix(self.plan), *env, *argv]

    def run(self, *argv: str, check: bool = True) -> str:
        """Run a program on the controller, and return its output. If the program fails, raises UserError."""
        process = subprocess.run(self.build_command(argv), capture_output=True, text=True, check=False)
        if check and process.returncode:
            raise UserError(f"{argv[0]}: {process.stderr.strip().rpartition('error: ')[2] or process.returncode}")
        return process.stdout.strip()

    def run_as_root(self, function: Callable[[], object]) -> None:
        """Run a function as root inside the cluster. If the function fails, exit with the function's status."""
        status = run_in_namespaces(self.process, function)
        if status:
            sys.exit(status)  # the function has already printed the reason


def find_cluster_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the state folder of a cluster. Raises UserError if the name is invalid."""
    base = environ.get("CLUSTER_DIR") or environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 (checked on use)
    return Path(base).absolute() / f"cluster-{os.getuid()}-{slurm_conf.check_cluster_name(name)}"


def find_running_cluster(name: str = DEFAULT_NAME) -> Cluster | None:
    """Return this user's cluster with this name, or None if the cluster is not up.

    Inside a cluster, None is also returned, because programs inside a cluster can run sbatch directly.
    """
    folder = find_cluster_folder(name)
    if not is_owned_by_this_user(folder):
        return None
    process = Process.load(folder / "holder")
    return Cluster(Plan.load(folder), process) if process else None


def is_owned_by_this_user(path: Path) -> bool:
    """Return whether a folder belongs to this user. In /tmp, other users can also create folders."""
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:  # the folder does not exist, or is below a folder that this user cannot enter
        return False


def list_running_clusters() -> list[str]:
    """Return the names of this user's running clusters."""
    default = find_cluster_folder(DEFAULT_NAME)
    prefix = default.name.removesuffix(DEFAULT_NAME)
    names = []
    for folder in sorted(default.parent.glob(f"{prefix}*")):
        if is_owned_by_this_user(folder) and Process.load(folder / "holder"):
            names.append(folder.name.removeprefix(prefix))
    return names


def choose_running_cluster() -> Cluster | None:
    """Return the cluster with the default name if it is up, else the only cluster that is up.

    Returns None if no cluster is up. Raises UserError if several clusters are up and none has the default name.
    """
    names = list_running_clusters()
    if DEFAULT_NAME in names:
        return find_running_cluster(DEFAULT_NAME)
    if len(names) > 1:
        raise UserError(
            f"several local clusters are up: {', '.join(names)}; choose one, such as LAUNCH=slurm:{names[0]} "
            f"(NAME={names[0]} for make cluster-status and similar commands), or use LAUNCH=local"
        )
    return find_running_cluster(names[0]) if names else None


def require_running_cluster(name: str) -> Cluster:
    """Return the cluster with this name. Raises UserError if the cluster is not up."""
    cluster = find_running_cluster(name)
    if not cluster:
        setting = "" if name == DEFAULT_NAME else f" NAME={name}"
        raise UserError(f"cluster {name} is not up; start it with: make cluster-up{setting}")
    return cluster
