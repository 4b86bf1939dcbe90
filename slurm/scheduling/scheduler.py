"""Calls of SLURM commands with timeouts, and the choice of a SLURM cluster. This module does not import torch."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from common.system.causes import Cause
from common.system.errors import UserError
from common.system.text import format_count
from slurm.local_cluster import cluster
from slurm.scheduling import slurm_output

LOCAL_CLUSTER_NAME = "the local cluster"
COMMAND_TIMEOUT = 15.0
"""Default timeout in seconds of a SLURM command."""
STATUS_TIMEOUT = 4.0
"""Timeout in seconds of a query by a report command. The command may make several queries."""
RETRY_SECONDS = 0.5
"""Timeout in seconds of each query after a failed query, if the requested timeout is at most STATUS_TIMEOUT."""
PING_AFTER_SECONDS = 1.2
"""If a query is not answered within this many seconds, `scontrol ping` checks the controller."""
CONTROLLER_COMMANDS = ("squeue", "scontrol")
"""Commands that query the controller. If one of these commands gets no answer, the other is not tried."""
QUEUE_CACHE_SECONDS = 1.0
"""Time, in seconds, for which the output of squeue is reused."""
SLOW_FAILURE_SECONDS = 1.0
"""If a query fails after more than this many seconds, it is not repeated for COOLDOWN_SECONDS."""
COOLDOWN_SECONDS = 15.0
CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Paths of slurm.conf in packages."""
RELATIVE_CONFIGURATIONS = ("etc/slurm.conf", "etc/slurm/slurm.conf")
"""Paths of slurm.conf relative to the folder in which SLURM is installed from its source code."""
PACKAGE_INSTALLATION = Path("/usr")
ENDED_JOB_STATES = {"COMPLETED": "LOST", "CANCELLED": "CANCELLED", "PREEMPTED": "PREEMPTED"}
"""State of a run without a result, by the state of its ended job. For other job states, the state is FAILED."""
PENDING_JOB_STATES = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
    "STOPPED",
    "SUSPENDED",
)
RUNNING_JOB_STATES = ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT")
ALLOCATION_VARIABLE_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_", "TORCHELASTIC_", "SUBMITIT_")
"""Prefixes of variables that an allocation or launcher sets and that must not reach a nested job."""
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)

# Commands that query many runs one by one use these caches. The key is the argv prefix of a SLURM command.
QUEUE_CACHE: dict[tuple[str, ...], tuple[float, dict[str, str]]] = {}
"""Time at which the queue was listed, and the state and reason of each job in it."""
FAILURE_CACHE: dict[tuple[str, ...], tuple[float, str]] = {}
"""Time and error message of the latest slow failure."""
CLUSTER_NAME_CACHE: dict[tuple[str, ...], str] = {}
"""Name of the SLURM cluster."""


class CommandError(UserError):
    """Error of a SLURM command that failed.

    `output` is the error message of the command in one line.
    """

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message, cause=slurm_output.classify_output(output))
        self.output = output


def remove_launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of an allocation or launcher. SLURM_CONF is kept."""
    cleaned = {
        k: v
        for k, v in environ.items()
        if not k.startswith(ALLOCATION_VARIABLE_PREFIXES) and k not in LAUNCHER_VARIABLES
    }
    if "SLURM_CONF" in environ:
        cleaned["SLURM_CONF"] = environ["SLURM_CONF"]
    return cleaned


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A SLURM cluster to which jobs can be submitted."""

    name: str
    local: cluster.Cluster | None = None
    required_cluster: str = ""
    """Name of the SLURM cluster on which a job was submitted. An empty value means that any cluster may have the job.

    Clusters with a common file system have jobs with the same ids.
    """

    def build_command(self, *command: str) -> list[str]:
        """Return the argv that runs a SLURM command from this process."""
        return self.local.build_command(command) if self.local else list(command)

    def run_command(self, *command: str, timeout: float | None = None, doubt: float | None = None) -> str:
        """Run a SLURM command and return its output.

        Raises UserError with SLURM's message if the command fails or times out. SLURM commands retry for a long time.
        The command is therefore stopped if it has not ended after `doubt` seconds and the controller is down.
        """
        timeout = timeout or COMMAND_TIMEOUT
        doubt = timeout if doubt is None else min(doubt, timeout)
        try:
            with subprocess.Popen(
                self.build_command(*command),
                env=remove_launcher_variables(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process:
                try:
                    stdout, stderr = self.wait_for_output(process, timeout, doubt)
                except BaseException:
                    process.kill()
                    raise
        except FileNotFoundError:
            raise UserError(f"{command[0]} is not installed here; use a login node, or LAUNCH=local") from None
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{self.name}: {command[0]} did not answer within {timeout:.0f} s; check that the cluster is up"
            ) from None
        if process.returncode:
            problem = " ".join((stderr or stdout).split()) or f"exit status {process.returncode}"
            raise CommandError(f"{self.name}: {command[0]} failed: {problem}", problem)
        return stdout

    def wait_for_output(self, process: subprocess.Popen[str], timeout: float, doubt: float) -> tuple[str, str]:
        """Wait for a command to end, and return its standard output and standard error.

        Raises TimeoutExpired after `timeout` seconds, or UserError if the controller is down.
        """
        deadline = time.monotonic() + timeout
        try:
            return process.communicate(timeout=doubt)
        except subprocess.TimeoutExpired:
            if doubt >= timeout:
                raise
            if self.is_controller_down():
                raise UserError(f"{self.name}: the controller is down") from None
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))

    def is_controller_down(self) -> bool:
        """Return whether the controller is down. Returns False if `scontrol ping` takes more than a second."""
        try:
            answer = self.run_command("scontrol", "ping", timeout=1.0)
        except CommandError as error:
            answer = error.output
        except UserError:
            return False
        is_one_down = slurm_output.classify_output(answer) is Cause.CONTROLLER_DOWN
        return is_one_down and not slurm_output.is_controller_up(answer)  # a backup controller may be up

    def run_query(self, *command: str, timeout: float = COMMAND_TIMEOUT) -> str:
        """Run a query and return its output. Raises UserError if the query fails.

        After a slow failure, queries are skipped for COOLDOWN_SECONDS, and UserError is raised immediately.
        """
        asks_controller = command[0] in CONTROLLER_COMMANDS
        start = time.monotonic()
        key = tuple(self.build_command(command[0]))
        failed_at, problem = FAILURE_CACHE.get(key, (0.0, ""))
        if problem and start - failed_at < COOLDOWN_SECONDS:
            raise UserError(problem)
        try:
            doubt = PING_AFTER_SECONDS if asks_controller else None
            return self.run_command(*command, timeout=min(timeout, COMMAND_TIMEOUT / 3), doubt=doubt)
        except UserError as error:
            is_slow = time.monotonic() - start > min(SLOW_FAILURE_SECONDS, 0.9 * timeout)
            if is_slow and error.cause is not Cause.UNKNOWN_JOB:  # this error does not mean that the controller is slow
                for name in CONTROLLER_COMMANDS if asks_controller else command[:1]:
                    FAILURE_CACHE[tuple(self.build_command(name))] = time.monotonic(), str(error)
            raise

    def read_queue(self, timeout: float = COMMAND_TIMEOUT) -> dict[str, str]:
        """Return `STATE|REASON` of each of the user's jobs in the queue, by job id.

        The output of squeue is reused for QUEUE_CACHE_SECONDS.
        """
        key = tuple(self.build_command("squeue"))
        read_at, jobs = QUEUE_CACHE.get(key, (0.0, {}))
        if read_at and time.monotonic() - read_at <= QUEUE_CACHE_SECONDS:
            return jobs
        jobs = {}
        listing = self.run_query("squeue", "-h", "-r", "--me", "-o", "%i|%T|%r", timeout=timeout)
        for line in listing.splitlines():
            job, _, description = line.strip().partition("|")
            jobs[job] = description
        QUEUE_CACHE[key] = time.monotonic(), jobs
        return jobs

    def read_cluster_name(self) -> str:
        """Return the name of the SLURM cluster, or an empty string if it is a local cluster or does not answer."""
        if self.local is not None:
            return ""
        key = tuple(self.build_command("scontrol"))
        if key not in CLUSTER_NAME_CACHE:
            try:
                configuration = self.run_query("scontrol", "show", "config", timeout=STATUS_TIMEOUT)
            except UserError:
                return ""
            match = re.search(r"^ClusterName\s*=\s*(\S+)", configuration, re.MULTILINE)
            CLUSTER_NAME_CACHE[key] = match[1] if match else ""
        return CLUSTER_NAME_CACHE[key]

    def check_cluster(self, job: str) -> None:
        """Raise UserError if a job belongs to another SLURM cluster than the one that this host uses."""
        name = self.read_cluster_name() if self.required_cluster else ""
        if name and name != self.required_cluster:
            problem = f"job {job} belongs to the SLURM cluster {self.required_cluster}, but this host uses {name}"
            remedy = (
                f"use a login node of {self.required_cluster}, or, if that cluster no longer exists, delete its name"
            )
            raise UserError(f"{problem}; {remedy} in meta.json of the run")

    def read_job_state(self, job: str, timeout: float = COMMAND_TIMEOUT) -> tuple[str, str, Cause]:
        """Return the state of a run, a description of its job, and the cause of a failure.

        SLURM reports the state of the job with squeue, scontrol, or sacct. The state of the run is LOST if SLURM does
        not know the job, and UNKNOWN if all queries fail or the job belongs to another SLURM cluster.
        """
        try:
            self.check_cluster(job)
        except UserError as error:
            return "UNKNOWN", str(error), Cause.OTHER
        queries = (
            ("squeue",),
            ("scontrol", "-o", "show", "job", job),
            ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State"),
        )
        problems: list[UserError] = []
        for query in queries:
            query_timeout = timeout
            if problems:
                query_timeout = min(timeout, RETRY_SECONDS) if timeout <= STATUS_TIMEOUT else timeout / 3
            try:
                if query == ("squeue",):
                    answer = self.read_queue(query_timeout).get(job, "")
                else:
                    answer = self.run_query(*query, timeout=query_timeout).strip()
            except UserError as error:
                problems.append(error)
                continue
            note = ""
            if query[0] == "scontrol":
                fields = parse_job_fields(answer)
                answer = fields.get("JobState", "")
                if fields.get("Reason") == "JobLaunchFailure":
                    host = fields.get("BatchHost", "the first host")
                    note = f": {host} could not start the job; check that this host can write to the run folder"
            state_text, _, reason = answer.rpartition("\n")[2].partition("|")
            state = state_text.strip().partition(" ")[0].rstrip("+")  # sacct prints, for example, CANCELLED by 1000
            if state in PENDING_JOB_STATES:
                return "PENDING", f"job {job} {reason}".strip(), Cause.OTHER
            if state in RUNNING_JOB_STATES:
                return "RUNNING", f"job {job}", Cause.OTHER
            if state:
                run_state = ENDED_JOB_STATES.get(state, "FAILED")
                return run_state, f"job {job} {state}{note}", slurm_output.classify_job_state(state)
        failures = [problem for problem in problems if problem.cause is not Cause.UNKNOWN_JOB]
        if len(failures) == len(queries):
            return "UNKNOWN", str(failures[0]), Cause.OTHER
        return "LOST", f"job {job} is no longer known to SLURM", Cause.OTHER

    def check_enough_hosts(self, nodes: int, partition: str, spares: int = 0) -> None:
        """Raise UserError if the controller does not answer or the cluster has fewer than `nodes + spares` hosts.

        sbatch accepts a job that requests more hosts than the cluster has, but the job would wait forever.
        """
        self.check_controller_answers()
        selection = [f"--partition={partition}"] if partition else []
        counts = self.run_command("sinfo", "-h", "-o", "%D", *selection).split()
        hosts = sum(map(int, counts))
        if partition and not hosts:
            raise UserError(f"{self.name} has no partition {partition}; sinfo lists the partitions")
        if nodes + spares <= hosts:
            return
        place = f" in partition {partition}" if partition else ""
        request = f"NODES={nodes} and elastic.spares={spares}" if spares else f"NODES={nodes}"
        total = " in total" if spares else ""
        size = format_count(hosts, "host")
        raise UserError(f"{request}, but {self.name} has {size}{place}; request at most {hosts}{total}")

    def check_controller_answers(self) -> None:
        """Raise UserError if the controller does not answer."""
        try:
            answer = self.run_command("scontrol", "ping")
        except CommandError as error:
            if error.cause is not Cause.CONTROLLER_DOWN:
                raise
            answer = error.output
        if slurm_output.is_controller_up(answer):
            return
        problem = " ".join(answer.partition("**")[0].split())  # asterisks enclose a longer explanation
        raise UserError(f"{self.name}: the controller does not answer ({problem}); try later, or use LAUNCH=local")


def parse_job_fields(text: str) -> dict[str, str]:
    """Parse the fields that `scontrol -o show job` prints into a dict."""
    return dict(field.partition("=")[::2] for field in text.split())


def is_slurm_configured(sbatch: str, *, is_required: bool) -> bool:
    """Return whether SLURM is configured. Debian installs sbatch without a configuration.

    `sbatch` is the path of the program. If there is no file slurm.conf, hosts may get the configuration from the
    controller. `scontrol ping` then shows whether there is a configuration. Since this may take several seconds without
    a network, the command is executed only if the user requires SLURM or the program is not from a package.
    """
    if path := os.environ.get("SLURM_CONF"):
        return Path(path).exists()
    installation = Path(sbatch).resolve().parent.parent
    paths = [*map(Path, CONFIGURATIONS), *(installation / path for path in RELATIVE_CONFIGURATIONS)]
    if any(path.exists() for path in paths):
        return True
    if not is_required and installation == PACKAGE_INSTALLATION:
        return False
    try:
        Scheduler("SLURM").run_command("scontrol", "ping")
    except UserError as error:
        return error.cause is not Cause.NO_CONFIGURATION
    return True


def choose_scheduler(launch: str) -> Scheduler | None:
    """Return the SLURM cluster for a value of LAUNCH, or None to start processes on this machine. Raises UserError.

    The value is auto, local, slurm, or slurm:NAME. Since several local clusters can be up, slurm:NAME selects one by
    name. With auto, a local cluster is used if one is up; otherwise, SLURM is used if it is configured. If the chosen
    cluster does not answer, this is an error; the run does not start on this machine instead.
    """
    kind, _, name = launch.partition(":")
    has_name = ":" in launch
    if kind not in ("auto", "local", "slurm") or (has_name and (kind != "slurm" or not name)):
        raise UserError(f"LAUNCH={launch} is unknown; use auto, local, slurm, or slurm:NAME for a local cluster")
    if launch == "local":
        return None
    local = cluster.require_running_cluster(name) if name else cluster.choose_running_cluster()
    if local is not None:
        is_default = local.plan.name == cluster.DEFAULT_NAME
        return Scheduler(LOCAL_CLUSTER_NAME if is_default else f"{LOCAL_CLUSTER_NAME} {local.plan.name}", local)
    sbatch = shutil.which("sbatch")
    if sbatch is not None and is_slurm_configured(sbatch, is_required=launch == "slurm"):
        return Scheduler("SLURM")
    if launch == "auto":
        return None
    problem = "sbatch is not installed here; use a login node"
    if sbatch is not None:
        problem = "SLURM is not configured here; use a login node, set SLURM_CONF to the path of slurm.conf"
    raise UserError(f"LAUNCH=slurm, but {problem}, or start a local cluster: make cluster-up")
