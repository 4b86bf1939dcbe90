"""Configuration files of a local cluster, such as slurm.conf, and the programs that the cluster needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from common.system.errors import UserError

MAX_NODES = 64
MAX_FOLDER_LENGTH = 67  # maximum length of the path of a cluster's folder, in characters
CONTROLLER_ADDRESS = "10.77.0.254"  # address of the controller in the private network of every cluster
CONTROLLER_PORT = 16817
DATABASE_DAEMON_PORT = 16819
DATABASE_PORT = 13306
FOLDERS = ("bin", "db", "etc", "hosts", "log", "run", "spool", "state")
ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # folders of slurmctld, slurmd, and ip, which may be missing in PATH
PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "scontrol", "sinfo", "sbatch", "srun"),
    "iproute2": ("ip",),
    "util-linux": ("nsenter", "unshare"),
}
DATABASE_PACKAGES = {"mariadb-server": ("mariadbd", "mariadb-install-db"), "slurmdbd": ("slurmdbd",)}
MUNGE_PACKAGES = {"munge": ("munged",)}

SACCT_SCRIPT = r"""#!/bin/sh
# Replacement for sacct on clusters without accounting. This script prints the jobs that the controller remembers, in
# the format of `sacct --parsable2`. It knows the fields JobID, State and NodeList.
jobs=
fields=JobID,State,NodeList
header=1
while [ $# -gt 0 ]; do
  case $1 in
    -n|--noheader) header= ;;
    -o|--format) fields=$2; shift ;;
    -o*) fields=${1#-o} ;;
    --format=*) fields=${1#--format=} ;;
    -j|--jobs) jobs="$jobs $(echo "$2" | tr , ' ')"; shift ;;
    -j*) jobs="$jobs $(echo "${1#-j}" | tr , ' ')" ;;
    --jobs=*) jobs="$jobs $(echo "${1#--jobs=}" | tr , ' ')" ;;
  esac
  shift
done
if [ -n "$jobs" ]; then for job in $jobs; do scontrol -o show job "$job" 2>/dev/null; done
else scontrol -o show job; fi | awk -v fields="$fields" -v header="$header" '
  BEGIN {
    count = split(fields, names, ",")
    if (header) { gsub(",", "|", fields); print fields }
  }
  /^JobId=/ {
    split("", value)
    for (i = 1; i <= NF; i++) { at = index($i, "="); if (at) value[substr($i, 1, at - 1)] = substr($i, at + 1) }
    id = value["JobId"]
    if ("ArrayJobId" in value) {
      task = value["ArrayTaskId"]
      id = value["ArrayJobId"] "_" (task ~ /^[0-9]+$/ ? task : "[" task "]")
    }
    nodes = value["NodeList"]
    shown["JobID"] = id
    shown["State"] = value["JobState"]
    shown["NodeList"] = nodes == "" || nodes == "(null)" ? "None assigned" : nodes
    line = shown[names[1]]
    for (i = 2; i <= count; i++) line = line "|" shown[names[i]]
    print line
  }'
"""


@dataclass(frozen=True)
class Plan:
    """Properties of a local cluster. The properties do not change after the cluster has started."""

    name: str
    folder: Path
    """Folder that contains all files of the cluster."""
    nodes: int
    cpus: int
    memory: int
    """Memory in MiB that each host reports to SLURM."""
    user: str
    uid: int
    gid: int
    auth: str
    """Authentication method: none or munge."""
    database: bool
    first_job: int
    settings: dict[str, str]
    """Values for slurm.conf, by key. These values replace or extend the default values."""
    rate: float = 0.0
    """Data rate of each cable in each direction, in bits per second; 0 means unlimited."""
    delay: float = 0.0
    """Delay of each cable in each direction, in seconds."""

    def save(self) -> None:
        """Write plan.json into the cluster's folder."""
        (self.folder / "plan.json").write_text(json.dumps(asdict(self), default=str, indent=2))

    @staticmethod
    def load(folder: Path) -> Plan:
        """Read plan.json from the folder of a cluster."""
        return Plan(**json.loads((folder / "plan.json").read_text()) | {"folder": folder})

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables (SLURM_CONF and PATH) that a program needs to find the cluster and its tools."""
        path = f"{self.folder / 'bin'}:{make_search_path()}"
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}


def make_search_path() -> str:
    """Return PATH with the folders of administration programs appended, without duplicates."""
    folders = f"{os.environ.get('PATH', '')}:{ADMIN_PATH}".strip(":").split(":")
    return ":".join(dict.fromkeys(folders))


def format_host_name(number: int) -> str:
    """Return the name of the host with this number."""
    return f"node{number}"


def format_host_address(number: int) -> str:
    """Return the address of the host with this number."""
    return f"10.77.0.{number}"


def check_cluster_name(text: str) -> str:
    """Return `text` if it is a valid name for a cluster. Otherwise, raises UserError.

    A valid name can be used in slurm.conf and as part of the names of folders and database tables.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", text):
        raise UserError(f"NAME={text} is invalid; use at most 31 characters (a-z, 0-9, _), starting with a letter")
    return text


def parse_slurm_conf_settings(lines: list[str]) -> dict[str, str]:
    """Parse `Key=Value` pairs for slurm.conf. Raises UserError."""
    settings = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z][A-Za-z0-9]*)=([^\s#]+)", line)
        if not match:
            raise UserError(f"--conf {line!r}: expected one Key=Value line of slurm.conf, such as KillWait=5")
        if match[1].lower() in ("nodename", "partitionname", "include"):
            raise UserError(f"--conf {line!r}: hosts and partitions cannot be changed here; set --nodes or --cpus")
        settings[match[1]] = match[2]
    return settings


def check_cluster_folder(folder: Path) -> Path:
    """Return `folder` if its path is valid in slurm.conf. Otherwise, raises UserError.

    Linux limits the path of a socket to 107 bytes. The longest path of a socket, relative to the folder, is
    /spool/node64/node64_<job, 8 digits>.<step, 10 digits>.
    """
    if not re.fullmatch(r"/[\w.+/-]+", str(folder), re.ASCII) or len(str(folder)) > MAX_FOLDER_LENGTH:
        raise UserError(
            f"{folder}: slurm.conf requires a short path without spaces; set CLUSTER_DIR to a path such as /tmp/mine"
        )
    return folder


def check_programs(auth: str, database: bool) -> None:
    """Raise UserError with the names of the packages to install if a program is missing."""
    if sys.platform != "linux":
        raise UserError(
            "a local cluster requires Linux (network namespaces); use a Linux machine, container, or virtual machine"
        )
    required = dict(PACKAGES)
    if auth == "munge":
        required |= MUNGE_PACKAGES
    if database:
        required |= DATABASE_PACKAGES
    missing: dict[str, str] = {}
    for package, programs in required.items():
        missing |= {program: package for program in programs if not find_program(program)}
    if missing:
        packages = " ".join(dict.fromkeys(missing.values()))
        raise UserError(f"{', '.join(missing)} not found; on Debian or Ubuntu, run apt-get install {packages}")


def find_program(name: str) -> str | None:
    """Return the path of a program in PATH or ADMIN_PATH, or None if the program is not found."""
    return shutil.which(name, path=make_search_path())


def choose_auth() -> str:
    """Return the authentication method: `none` if SLURM was built with it, else `munge`.

    The method `none` requires no daemon. This method is sufficient because the network of the cluster is private.
    """
    daemon = find_program("slurmctld")
    if not daemon:
        return "none"
    prefix = Path(daemon).resolve().parent.parent
    for plugins in [*prefix.glob("lib*/slurm*"), *prefix.glob("lib/*/slurm*")]:
        if (plugins / "auth_none.so").exists() and (plugins / "cred_none.so").exists():
            return "none"
    return "munge"


def choose_first_job_id(last: int, now: float) -> int:
    """Return a first job id that exceeds all earlier job ids, even if the state folder has been deleted.

    Commands find result files and logs by job id, so old results would be shown for a job with a reused id.
    """
    since_2025 = now - 1735689600
    return max(last + 1000, int(since_2025) // 10)


def make_default_slurm_conf_values(plan: Plan) -> dict[str, str]:
    """Return the default values of slurm.conf, which the settings of the plan can replace."""
    folder = plan.folder
    values = {
        "ClusterName": plan.name,
        "SlurmctldHost": f"ctl({CONTROLLER_ADDRESS})",
        "SlurmctldPort": str(CONTROLLER_PORT),
        "SlurmdPort": "16818",
        "SrunPortRange": "60001-63000",
        "SlurmUser": plan.user,
        "SlurmdUser": plan.user,
        "AuthType": f"auth/{plan.auth}",
        "CredType": f"cred/{plan.auth}",
        "AuthInfo": "cred_expire=5",  # seconds before a requeued job may start again; SLURM's default is 120
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd-%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd-%n.log",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
        # All hosts share one kernel. Cgroups and CPU binding are disabled, and the plan sets the number of CPUs.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "SlurmdParameters": "config_overrides",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=1,sched_interval=1,bf_interval=1",
        "FirstJobId": str(plan.first_job),
        "MinJobAge": "86400",  # the replacement for sacct lists only jobs that the controller remembers
        "JobRequeue": "1",
        "ReturnToService": "2",  # SLURM uses a host again as soon as the host returns
        "SlurmdTimeout": "10",
        "KillWait": "5",
        "MailProg": "/bin/true",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "AccountingStorageType": "accounting_storage/none",
    }
    if plan.auth == "munge":
        values["AuthInfo"] += f",socket={folder}/run/munge.sock"
        values["AccountingStoragePass"] = f"{folder}/run/munge.sock"  # same socket as in AuthInfo
    if plan.database:
        values["AccountingStorageType"] = "accounting_storage/slurmdbd"
        values["AccountingStorageHost"] = "ctl"
        values["AccountingStoragePort"] = str(DATABASE_DAEMON_PORT)
    return values


def make_slurm_conf(plan: Plan) -> str:
    """Return the text of slurm.conf."""
    grace = "0"
    lines = {key.lower(): f"{key}={value}" for key, value in make_default_slurm_conf_values(plan).items()}
    for key, value in plan.settings.items():
        if key.lower() == "gracetime":  # GraceTime is a setting of a partition
            grace = value
        else:
            lines[key.lower()] = f"{key}={value}"
    rows = [
        *lines.values(),
        f"NodeName=node[1-{plan.nodes}] CPUs={plan.cpus} RealMemory={plan.memory} State=UNKNOWN",
        f"PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}",
        "PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF",
    ]
    return "\n".join(rows) + "\n"


def make_slurmdbd_conf(plan: Plan) -> str:
    """Return the text of slurmdbd.conf. The database needs no password because it is in a private network."""
    rows = [
        f"AuthType=auth/{plan.auth}",
        "DbdHost=ctl",
        f"DbdPort={DATABASE_DAEMON_PORT}",
        f"SlurmUser={plan.user}",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={DATABASE_PORT}",
        "StorageUser=slurm",
        "StorageLoc=slurm_acct_db",
        f"LogFile={plan.folder}/log/slurmdbd.log",
        f"PidFile={plan.folder}/run/slurmdbd.pid",
    ]
    if plan.auth == "munge":
        rows.append(f"AuthInfo=socket={plan.folder}/run/munge.sock")
    return "\n".join(rows) + "\n"


def make_hosts_file(plan: Plan) -> str:
    """Return the text of /etc/hosts.

    Host names never resolve to loopback addresses (127.x), because ranks send their addresses to other hosts.
    """
    rows = ["127.0.0.1 localhost", f"{CONTROLLER_ADDRESS} ctl"]
    for number in range(1, plan.nodes + 1):
        rows.append(f"{format_host_address(number)} {format_host_name(number)}")
    return "\n".join(rows) + "\n"


def write_cluster_files(plan: Plan) -> None:
    """Write all files of a cluster into its folder.

    The folder is emptied first, because jobs of an earlier cluster would otherwise continue.
    """
    for name in FOLDERS:
        shutil.rmtree(plan.folder / name, ignore_errors=True)
        (plan.folder / name).mkdir()
    for number in range(1, plan.nodes + 1):
        (plan.folder / "spool" / format_host_name(number)).mkdir()
    texts = {
        "slurm.conf": make_slurm_conf(plan),
        "slurmdbd.conf": make_slurmdbd_conf(plan),
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",  # not used, but the automatic detection of a plugin can fail
        "etc/hosts": make_hosts_file(plan),
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
        "etc/resolv.conf": "",  # no name server, so that lookups of unknown names fail immediately
        "first_job": f"{plan.first_job}\n",
    }
    for name, text in texts.items():
        (plan.folder / name).write_text(text)
    (plan.folder / "slurmdbd.conf").chmod(0o600)  # required by slurmdbd
    if not plan.database:
        sacct = plan.folder / "bin" / "sacct"
        sacct.write_text(SACCT_SCRIPT)
        sacct.chmod(0o755)
    plan.save()
