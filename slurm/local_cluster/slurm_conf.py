"""The files of a cluster as text: slurm.conf and others; and the programs it needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from common.core.errors import UserError

MOST_NODES = 64
LONGEST = 67  # characters of the path of a cluster's folder
CONTROLLER = "10.77.0.254"  # the controller's address; every cluster has a network of its own, so all use the same
FOLDERS = ("bin", "db", "etc", "hosts", "log", "run", "spool", "state")
ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # slurmctld, slurmd and ip lie here, which is not on every user's PATH
PACKAGES = {
    "slurm-wlm": ("slurmctld", "slurmd", "scontrol", "sinfo", "sbatch", "srun"),
    "iproute2": ("ip",),
    "util-linux": ("nsenter", "unshare"),
}
DATABASE = {"mariadb-server": ("mariadbd", "mariadb-install-db"), "slurmdbd": ("slurmdbd",)}
MUNGE = {"munge": ("munged",)}

SACCT = r"""#!/bin/sh
# sacct without accounting: what the controller still remembers, as `sacct --parsable2 -o JobID,State,NodeList`.
jobs=
while [ $# -gt 0 ]; do
  case $1 in
    -j|--jobs) jobs="$jobs $(echo "$2" | tr , ' ')"; shift ;;
    -j*) jobs="$jobs $(echo "${1#-j}" | tr , ' ')" ;;
    --jobs=*) jobs="$jobs $(echo "${1#--jobs=}" | tr , ' ')" ;;
  esac
  shift
done
if [ -n "$jobs" ]; then for job in $jobs; do scontrol -o show job "$job" 2>/dev/null; done
else scontrol -o show job; fi | awk '
  BEGIN { print "JobID|State|NodeList" }
  /^JobId=/ {
    split("", value)
    for (i = 1; i <= NF; i++) { at = index($i, "="); if (at) value[substr($i, 1, at - 1)] = substr($i, at + 1) }
    id = value["JobId"]
    if ("ArrayJobId" in value) {
      task = value["ArrayTaskId"]
      id = value["ArrayJobId"] "_" (task ~ /^[0-9]+$/ ? task : "[" task "]")
    }
    nodes = value["NodeList"]
    print id "|" value["JobState"] "|" (nodes == "" || nodes == "(null)" ? "None assigned" : nodes)
  }'
"""


@dataclass(frozen=True)
class Plan:
    """The fixed facts of a cluster that is up."""

    name: str
    folder: Path
    """All that the cluster writes lies here."""
    nodes: int
    cpus: int
    memory: int
    """MiB that each host claims to have."""
    user: str
    uid: int
    gid: int
    auth: str
    """none or munge."""
    database: bool
    first_job: int
    settings: dict[str, str]
    """Lines of slurm.conf that replace or extend the ones below."""
    rate: float = 0.0
    """Bits per second of each cable in each direction; 0 is as fast as the machine."""
    delay: float = 0.0
    """Seconds that each cable holds a packet back, in each direction."""

    def save(self) -> None:
        (self.folder / "plan.json").write_text(json.dumps(asdict(self), default=str, indent=2))

    @staticmethod
    def load(folder: Path) -> Plan:
        return Plan(**json.loads((folder / "plan.json").read_text()) | {"folder": folder})

    @property
    def environment(self) -> dict[str, str]:
        """The variables SLURM_CONF and PATH with which a program finds this cluster and its tools."""
        path = f"{self.folder / 'bin'}:{make_search_path()}"
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}


def make_search_path() -> str:
    """Join PATH and the folders of administrators' programs, each folder once."""
    return ":".join(dict.fromkeys(f"{os.environ.get('PATH', '')}:{ADMIN_PATH}".strip(":").split(":")))


def format_host_name(number: int) -> str:
    """Return the name of a host by its number."""
    return f"node{number}"


def format_host_address(number: int) -> str:
    """Return the address of a host by its number."""
    return f"10.77.0.{number}"


def check_cluster_name(text: str) -> str:
    """Return a cluster's name: part of a folder's name, of slurm.conf and of a database table. Raises UserError."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", text):
        raise UserError(f"NAME={text}: a cluster's name has only a-z, 0-9 and _, begins with a letter, at most 31")
    return text


def parse_settings(lines: list[str]) -> dict[str, str]:
    """Parse `Key=Value` pairs for slurm.conf. Raises UserError."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z][A-Za-z0-9]*)=([^\s#]+)", line)
        if not match:
            raise UserError(f"--conf {line!r}: write one Key=Value of slurm.conf, such as KillWait=5")
        if match[1].lower() in ("nodename", "partitionname", "include"):
            raise UserError(f"--conf {line!r}: hosts and partitions are laid out by the cluster; set --nodes or --cpus")
        found[match[1]] = match[2]
    return found


def check_folder(folder: Path) -> Path:
    """Return a folder whose path slurm.conf can hold. Raises UserError.

    A socket there has a name of at most 107 bytes: /spool/node64/node64_<job, 8 digits>.<step, 10 digits>.
    """
    if not re.fullmatch(r"/[\w.+/-]+", str(folder), re.ASCII) or len(str(folder)) > LONGEST:
        raise UserError(f"{folder}: slurm.conf needs a short path without blanks; set CLUSTER_DIR, as in /tmp/mine")
    return folder


def check_programs(auth: str, database: bool) -> None:
    """Raise UserError with the packages to install if a program is missing."""
    if sys.platform != "linux":
        raise UserError("a cluster needs Linux (network namespaces); use a Linux machine, a container or a virtual one")
    wanted = PACKAGES | (MUNGE if auth == "munge" else {}) | (DATABASE if database else {})
    lacking = {name: package for package, names in wanted.items() for name in names if not find_program(name)}
    if lacking:
        packages = " ".join(dict.fromkeys(lacking.values()))
        raise UserError(f"{', '.join(lacking)} not found; on Debian or Ubuntu: apt-get install {packages}")


def find_program(name: str) -> str | None:
    """Find a program, also one for administrators; None where there is none."""
    return shutil.which(name, path=make_search_path())


def choose_auth() -> str:
    """Choose `none` where SLURM was built with it: one daemon less. The network is private either way."""
    daemon = find_program("slurmctld")
    prefix = Path(daemon).resolve().parent.parent if daemon else Path("/usr")
    libraries = [path for pattern in ("lib*/slurm*", "lib/*/slurm*") for path in prefix.glob(pattern)]
    complete = any((path / "auth_none.so").exists() and (path / "cred_none.so").exists() for path in libraries)
    return "none" if complete or not daemon else "munge"


def choose_first_job_id(last: int, now: float) -> int:
    """Choose the first job id: above all earlier ones, even if the state folder was deleted in between.

    Result files and logs are found by job id, so an id that comes twice would show old results.
    """
    since_2025 = now - 1735689600
    return max(last + 1000, int(since_2025) // 10)


def list_default_values(plan: Plan) -> dict[str, str]:
    """List the values of slurm.conf that the plan's own settings may replace."""
    folder = plan.folder
    values = {
        "ClusterName": plan.name,
        "SlurmctldHost": f"ctl({CONTROLLER})",
        "SlurmctldPort": "16817",
        "SlurmdPort": "16818",
        "SrunPortRange": "60001-63000",
        "SlurmUser": plan.user,
        "SlurmdUser": plan.user,
        "AuthType": f"auth/{plan.auth}",
        "CredType": f"cred/{plan.auth}",
        "AuthInfo": "cred_expire=5",  # a requeued job waits this long; the default is two minutes
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd-%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd-%n.log",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
        # Hosts share one kernel: no cgroups, no binding, and the CPUs that the plan says.
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
        "MinJobAge": "86400",  # the sacct stand-in knows only what the controller remembers
        "JobRequeue": "1",
        "ReturnToService": "2",  # a host that comes back is used again, without an administrator
        "SlurmdTimeout": "10",
        "KillWait": "5",
        "MailProg": "/bin/true",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "AccountingStorageType": "accounting_storage/none",
    }
    if plan.auth == "munge":
        values["AuthInfo"] += f",socket={folder}/run/munge.sock"
        values["AccountingStoragePass"] = f"{folder}/run/munge.sock"  # its name for the same socket
    if plan.database:
        values |= {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageHost": "ctl"}
        values["AccountingStoragePort"] = "16819"
    return values


def make_slurm_conf(plan: Plan) -> str:
    """Write the text of slurm.conf."""
    given = {key.lower(): (key, value) for key, value in plan.settings.items()}
    grace = given.pop("gracetime", ("", "0"))[1]  # belongs to a partition, not to the whole
    lines = {key.lower(): (key, value) for key, value in list_default_values(plan).items()} | given
    rows = [f"{key}={value}" for key, value in lines.values()]
    rows += [
        f"NodeName=node[1-{plan.nodes}] CPUs={plan.cpus} RealMemory={plan.memory} State=UNKNOWN",
        f"PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}",
        "PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF",
    ]
    return "\n".join(rows) + "\n"


def make_slurmdbd_conf(plan: Plan) -> str:
    """Write the text of slurmdbd.conf. The database asks for no password: nobody else reaches its network."""
    rows = [
        f"AuthType=auth/{plan.auth}",
        *([f"AuthInfo=socket={plan.folder}/run/munge.sock"] if plan.auth == "munge" else []),
        "DbdHost=ctl",
        "DbdPort=16819",
        f"SlurmUser={plan.user}",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        "StoragePort=13306",
        "StorageUser=slurm",
        "StorageLoc=slurm_acct_db",
        f"LogFile={plan.folder}/log/slurmdbd.log",
        f"PidFile={plan.folder}/run/slurmdbd.pid",
    ]
    return "\n".join(rows) + "\n"


def make_hosts_file(plan: Plan) -> str:
    """Write the text of /etc/hosts: every name has an address of its own, never 127.x, as ranks tell it each other."""
    rows = ["127.0.0.1 localhost", f"{CONTROLLER} ctl"]
    rows += [f"{format_host_address(n)} {format_host_name(n)}" for n in range(1, plan.nodes + 1)]
    return "\n".join(rows) + "\n"


def write_cluster_files(plan: Plan) -> None:
    """Write all files of a cluster into its folder, which is emptied first: old jobs would come back and run on."""
    for name in FOLDERS:
        shutil.rmtree(plan.folder / name, ignore_errors=True)
        (plan.folder / name).mkdir()
    for number in range(1, plan.nodes + 1):
        (plan.folder / "spool" / format_host_name(number)).mkdir()
    texts = {
        "slurm.conf": make_slurm_conf(plan),
        "slurmdbd.conf": make_slurmdbd_conf(plan),
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",  # unused, but slurmd loads one, and detecting it can fail
        "etc/hosts": make_hosts_file(plan),
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
        "etc/resolv.conf": "",  # nobody to ask, so nothing to wait for
        "first_job": f"{plan.first_job}\n",
    }
    for name, text in texts.items():
        (plan.folder / name).write_text(text)
    (plan.folder / "slurmdbd.conf").chmod(0o600)  # slurmdbd insists
    if not plan.database:
        (plan.folder / "bin" / "sacct").write_text(SACCT)
        (plan.folder / "bin" / "sacct").chmod(0o755)
    plan.save()
