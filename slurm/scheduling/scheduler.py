"""SLURM's commands, with time limits, and the choice of the SLURM to use. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from common.core.errors import UserError
from common.core.text import format_count
from slurm.local_cluster import cluster

LOCAL_CLUSTER_NAME = "the local cluster"
COMMAND_TIMEOUT = 15.0
"""Seconds for a command of SLURM."""
STATUS_TIMEOUT = 4.0
"""Seconds for a query, of which a report may make several."""
RETRY_SECONDS = 0.5
"""Seconds for the next query after one without an answer, where the time limit is at most STATUS_TIMEOUT."""
PING_AFTER_SECONDS = 1.2
"""Seconds without an answer after which `scontrol ping` checks the controller."""
CONTROLLER_COMMANDS = ("squeue", "scontrol")
"""Commands that ask the controller: if one of them gets no answer, the others would not either."""
QUEUE_CACHE_SECONDS = 1.0
"""Seconds for which a listing of the queue is reused."""
SLOW_FAILURE_SECONDS = 1.0
"""A command that fails after at least so many seconds is not repeated for COOLDOWN_SECONDS."""
COOLDOWN_SECONDS = 15.0
CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
ENDED_JOB_STATES = {"COMPLETED": "LOST", "CANCELLED": "CANCELLED"}
"""States of runs whose jobs have ended without a result; all other jobs FAILED."""
PENDING_JOB_STATES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING")
RUNNING_JOB_STATES = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING")
ALLOCATION_VARIABLE_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_", "TORCHELASTIC_", "SUBMITIT_")
"""Prefixes of variables of an allocation or launcher, which would mislead a nested job."""
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)

# Caches of commands that query many runs one by one; the key is the argv prefix of a SLURM command.
QUEUE_CACHE: dict[tuple[str, ...], tuple[float, dict[str, str]]] = {}
"""Time of a listing of the queue, and state and reason of each job."""
FAILURE_CACHE: dict[tuple[str, ...], tuple[float, str]] = {}
"""Time of a slow failure, and its message."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a job: without variables of an allocation or launcher, but with SLURM_CONF."""
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
    """A SLURM to which jobs can be submitted."""

    name: str
    local: cluster.Cluster | None = None

    def build_command(self, *command: str) -> list[str]:
        """Return the argv that runs a SLURM command from this process."""
        return self.local.build_command(command) if self.local else list(command)

    def call(self, *command: str, timeout: float | None = None, doubt: float | None = None) -> str:
        """Run a command; returns its output. Raises UserError with SLURM's message if it fails or times out.

        After `doubt` seconds without an answer the command is stopped if the controller is down, because SLURM's
        commands keep retrying.
        """
        timeout = timeout or COMMAND_TIMEOUT
        doubt = timeout if doubt is None else min(doubt, timeout)
        try:
            with subprocess.Popen(
                self.build_command(*command),
                env=clean_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process:
                try:
                    stdout, stderr = self.wait_for(process, timeout, doubt)
                except BaseException:
                    process.kill()
                    raise
        except FileNotFoundError:
            raise UserError(f"{command[0]} is not installed here; go to a login node, or use LAUNCH=local") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.name}: {command[0]} gave no answer within {timeout:.0f} s; is it up?") from None
        if process.returncode:
            problem = " ".join((stderr or stdout).split()) or f"exit status {process.returncode}"
            raise UserError(f"{self.name}: {command[0]} failed: {problem}")
        return stdout

    def wait_for(self, process: subprocess.Popen[str], timeout: float, doubt: float) -> tuple[str, str]:
        """Return the output and errors of a command. Raises TimeoutExpired, or UserError if the controller is down."""
        deadline = time.monotonic() + timeout
        try:
            return process.communicate(timeout=doubt)
        except subprocess.TimeoutExpired:
            if doubt >= timeout:
                raise
            if self.is_down():
                raise UserError(f"{self.name}: the controller is down") from None
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))

    def is_down(self) -> bool:
        """Check whether the controller is down; false if `scontrol ping` takes more than a second."""
        try:
            return "is DOWN" in self.call("scontrol", "ping", timeout=1.0)
        except UserError as error:
            return "is DOWN" in str(error)

    def call_unless_failing(self, *command: str, timeout: float = COMMAND_TIMEOUT) -> str:
        """Run a query; returns its output. Raises UserError, without running it after a recent slow failure."""
        asks_controller = command[0] in CONTROLLER_COMMANDS
        start = time.monotonic()
        key = tuple(self.build_command(command[0]))
        failed_at, problem = FAILURE_CACHE.get(key, (0.0, ""))
        if problem and start - failed_at < COOLDOWN_SECONDS:
            raise UserError(problem)
        try:
            doubt = PING_AFTER_SECONDS if asks_controller else None
            return self.call(*command, timeout=min(timeout, COMMAND_TIMEOUT / 3), doubt=doubt)
        except UserError as error:
            is_slow = time.monotonic() - start > min(SLOW_FAILURE_SECONDS, 0.9 * timeout)
            if is_slow and "Invalid job id" not in str(error):  # which concerns a single job
                for name in CONTROLLER_COMMANDS if asks_controller else command[:1]:
                    FAILURE_CACHE[tuple(self.build_command(name))] = time.monotonic(), str(error)
            raise

    def read_queue(self, timeout: float = COMMAND_TIMEOUT) -> dict[str, str]:
        """Read `STATE|REASON` of the user's queued jobs by id; a listing serves all runs for QUEUE_CACHE_SECONDS."""
        key = tuple(self.build_command("squeue"))
        read_at, jobs = QUEUE_CACHE.get(key, (0.0, {}))
        if read_at and time.monotonic() - read_at <= QUEUE_CACHE_SECONDS:
            return jobs
        jobs = {}
        listing = self.call_unless_failing("squeue", "-h", "-r", "--me", "-o", "%i|%T|%r", timeout=timeout)
        for line in listing.splitlines():
            job, _, description = line.strip().partition("|")
            jobs[job] = description
        QUEUE_CACHE[key] = time.monotonic(), jobs
        return jobs

    def read_job_state(self, job: str, timeout: float = COMMAND_TIMEOUT) -> tuple[str, str]:
        """Return the state of a job and its reason, from squeue, scontrol or sacct; LOST if it is unknown."""
        queries = (
            ("squeue",),
            ("scontrol", "-o", "show", "job", job),
            ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State"),
        )
        problems: list[str] = []
        for query in queries:
            query_timeout = timeout
            if problems:
                query_timeout = min(timeout, RETRY_SECONDS) if timeout <= STATUS_TIMEOUT else timeout / 3
            try:
                if query == ("squeue",):
                    answer = self.read_queue(query_timeout).get(job, "")
                else:
                    answer = self.call_unless_failing(*query, timeout=query_timeout).strip()
            except UserError as error:
                problems.append(str(error))
                continue
            note = ""
            if query[0] == "scontrol":
                fields = parse_job_fields(answer)
                answer = fields.get("JobState", "")
                if fields.get("Reason") == "JobLaunchFailure":
                    note = f": {fields.get('BatchHost', 'its host')} could not start it; can it write the run folder?"
            state_text, _, reason = answer.rpartition("\n")[2].partition("|")
            state = state_text.strip().partition(" ")[0].rstrip("+")  # sacct: CANCELLED by 1000
            if state in PENDING_JOB_STATES:
                return "PENDING", f"job {job} {reason}".strip()
            if state in RUNNING_JOB_STATES:
                return "RUNNING", f"job {job}"
            if state:
                return ENDED_JOB_STATES.get(state, "FAILED"), f"job {job} {state}{note}"
        failures = [problem for problem in problems if "Invalid job id" not in problem]
        if len(failures) == len(queries):
            return "UNKNOWN", failures[0]
        return "LOST", f"job {job} is no longer known to SLURM"

    def check_enough_hosts(self, nodes: int, partition: str, spares: int = 0) -> None:
        """Raise UserError unless the controller answers and the cluster has `nodes` and `spares` hosts.

        sbatch accepts a job for more hosts than there are, which then waits forever.
        """
        self.check_controller()
        selection = [f"--partition={partition}"] if partition else []
        counts = self.call("sinfo", "-h", "-o", "%D", *selection).split()
        hosts = sum(map(int, counts))
        if partition and not hosts:
            raise UserError(f"{self.name} has no partition {partition}; sinfo lists them")
        if nodes + spares <= hosts:
            return
        place = f" in partition {partition}" if partition else ""
        request = f"NODES={nodes} and elastic.spares={spares}" if spares else f"NODES={nodes}"
        total = " in all" if spares else ""
        size = format_count(hosts, "host")
        raise UserError(f"{request}, but {self.name} has {size}{place}; ask for at most {hosts}{total}")

    def check_controller(self) -> None:
        """Raise UserError unless the controller answers."""
        try:
            answer = self.call("scontrol", "ping")
        except UserError as error:
            answer = str(error)
            if "is DOWN" not in answer:
                raise
        if "is UP" in answer:
            return
        problem = re.sub(r"\*\*.*", "", answer, flags=re.DOTALL).rpartition("failed: ")[2]
        problem = " ".join(problem.split())
        raise UserError(f"{self.name}: the controller does not answer ({problem}); try later, or LAUNCH=local")


def parse_job_fields(text: str) -> dict[str, str]:
    """Parse the fields that `scontrol -o show job` prints."""
    return dict(field.partition("=")[::2] for field in text.split())


def is_configured() -> bool:
    """Check whether sbatch is installed and has a configuration; Debian installs it without one."""
    if shutil.which("sbatch") is None:
        return False
    path = os.environ.get("SLURM_CONF")
    paths = [path] if path else CONFIGURATIONS
    return any(Path(path).exists() for path in paths)


def choose_scheduler(launch: str) -> Scheduler | None:
    """Choose the SLURM for LAUNCH=auto|local|slurm|slurm:NAME; None for processes of this machine. Raises UserError.

    slurm:NAME is the local cluster of that name; several can be up. auto chooses a local cluster if one is up, else
    SLURM if it is configured. A chosen SLURM that does not answer is an error: runs never fall back to this machine.
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
    if is_configured():
        return Scheduler("SLURM")
    if launch == "auto":
        return None
    problem = "sbatch is not installed" if shutil.which("sbatch") is None else "SLURM has no configuration"
    raise UserError(f"LAUNCH=slurm, but {problem} here; go to a login node, or make cluster-up for a local cluster")
