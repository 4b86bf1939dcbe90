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

LOCAL = "the local cluster"
PATIENCE = 15.0  # seconds for a command of SLURM
QUICK = 4.0  # seconds for those that only look, of which there may be several
LATER = 0.5  # seconds for the next command where one has not answered
DOUBTFUL = 1.2  # seconds after which the controller is asked whether it is up at all
CONTROLLER = ("squeue", "scontrol")  # commands that ask the controller: if it does not answer one, none is tried
FRESH = 1.0  # seconds for which the queue is taken to be as it was
LATE = 1.0  # seconds from which on a failure is not waited for once more
AGAIN = 15.0  # seconds for which it is then not asked again
CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
DOWN = {"COMPLETED": "LOST", "CANCELLED": "CANCELLED"}  # ended without a result: completed is no excuse
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING")
ALIVE = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING")
# what an allocation or a launcher leaves in the environment and would mislead a nested job
LEFTOVERS = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_", "TORCHELASTIC_", "SUBMITIT_")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

# of commands that look at many runs one after the other, by the words that start a command of SLURM
QUEUES: dict[tuple[str, ...], tuple[float, dict[str, str]]] = {}  # when, and the state of each job
FAILED: dict[tuple[str, ...], tuple[float, str]] = {}  # when, and why


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a job inherits: without an allocation's leftovers, with SLURM_CONF."""
    kept = {k: v for k, v in environ.items() if not k.startswith(LEFTOVERS) and k not in LAUNCHER}
    if "SLURM_CONF" in environ:
        kept["SLURM_CONF"] = environ["SLURM_CONF"]
    return kept


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A SLURM that jobs can be given to."""

    name: str
    local: cluster.Cluster | None = None

    def build_command(self, *words: str) -> list[str]:
        """Return the argv that runs a command of SLURM from here."""
        return self.local.build_command(words) if self.local else list(words)

    def call(self, *words: str, patience: float | None = None, doubt: float | None = None) -> str:
        """Run a command; returns its output. Raises UserError, with SLURM's own words, if it fails or hangs.

        After `doubt` seconds the command is given up if the controller is down: SLURM's commands go on trying.
        """
        patience = patience or PATIENCE
        try:
            with subprocess.Popen(
                self.build_command(*words),
                env=clean_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process:
                try:
                    out, err = self.wait_for(process, patience, patience if doubt is None else min(doubt, patience))
                except BaseException:
                    process.kill()
                    raise
        except FileNotFoundError:
            raise UserError(f"{words[0]} is not installed here; go to a login node, or use LAUNCH=local") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.name}: {words[0]} gave no answer within {patience:.0f} s; is it up?") from None
        if process.returncode:
            problem = " ".join((err or out).split()) or f"exit status {process.returncode}"
            raise UserError(f"{self.name}: {words[0]} failed: {problem}")
        return out

    def wait_for(self, process: subprocess.Popen[str], patience: float, doubt: float) -> tuple[str, str]:
        """Wait for a command's output and errors. Raises TimeoutExpired, or UserError if the controller is down."""
        deadline = time.monotonic() + patience
        try:
            return process.communicate(timeout=doubt)
        except subprocess.TimeoutExpired:
            if doubt >= patience:
                raise
            if self.is_down():
                raise UserError(f"{self.name}: the controller is down") from None
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))

    def is_down(self) -> bool:
        """Check for a controller that is down; false where `scontrol ping` takes more than a second."""
        try:
            return "is DOWN" in self.call("scontrol", "ping", patience=1.0)
        except UserError as error:
            return "is DOWN" in str(error)

    def call_unless_failing(self, *words: str, patience: float = PATIENCE) -> str:
        """Run a command that many runs need; returns its output. Raises UserError, at once if it just failed late."""
        key = tuple(self.build_command(words[0]))
        when, problem = FAILED.get(key, (0.0, ""))
        began = time.monotonic()
        if problem and began - when < AGAIN:
            raise UserError(problem)
        try:
            doubt = DOUBTFUL if words[0] in CONTROLLER else None
            return self.call(*words, patience=min(patience, PATIENCE / 3), doubt=doubt)
        except UserError as error:
            is_late = time.monotonic() - began > min(LATE, 0.9 * patience)
            if is_late and "Invalid job id" not in str(error):  # that is about this job alone
                for name in CONTROLLER if words[0] in CONTROLLER else words[:1]:
                    FAILED[tuple(self.build_command(name))] = time.monotonic(), str(error)
            raise

    def read_queue(self, patience: float = PATIENCE) -> dict[str, str]:
        """Read state and reason of our jobs in the queue by their ids, once for all runs."""
        key = tuple(self.build_command("squeue"))
        when, found = QUEUES.get(key, (0.0, {}))
        if not when or time.monotonic() - when > FRESH:
            lines = self.call_unless_failing(
                "squeue", "-h", "-r", "--me", "-o", "%i|%T|%r", patience=patience
            ).splitlines()
            found = {job: words for job, _, words in (line.strip().partition("|") for line in lines)}
            QUEUES[key] = time.monotonic(), found
        return found

    def read_job_state(self, job: str, patience: float = PATIENCE) -> tuple[str, str]:
        """Read the state of a job and its reason, from squeue, scontrol or sacct; a job that none knows is LOST."""
        asked = (
            ("squeue",),
            ("scontrol", "-o", "show", "job", job),
            ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State"),
        )
        problems = list[str]()
        for words in asked:
            left = (min(patience, LATER) if patience <= QUICK else patience / 3) if problems else patience
            try:
                if words == ("squeue",):
                    answer = self.read_queue(left).get(job, "")
                else:
                    answer = self.call_unless_failing(*words, patience=left).strip()
            except UserError as error:
                problems.append(str(error))
                continue
            note = ""
            if words[0] == "scontrol":
                fields = parse_job_fields(answer)
                answer = fields.get("JobState", "")
                if fields.get("Reason") == "JobLaunchFailure":
                    note = f": {fields.get('BatchHost', 'its host')} could not start it; can it write the run folder?"
            first, _, reason = answer.rpartition("\n")[2].partition("|")
            found = (first.split() or [""])[0].rstrip("+")
            if found in WAITING:
                return "PENDING", f"job {job} {reason}".strip()
            if found in ALIVE:
                return "RUNNING", f"job {job}"
            if found:
                return DOWN.get(found, "FAILED"), f"job {job} {found}{note}"
        silent = [problem for problem in problems if "Invalid job id" not in problem]
        if len(silent) == len(asked):
            return "UNKNOWN", silent[0]
        return "LOST", f"job {job} is not known to SLURM any more"

    def check_enough_hosts(self, nodes: int, partition: str, spares: int = 0) -> None:
        """Raise UserError unless the controller answers and there are as many hosts, with the spare ones.

        sbatch takes a job for more hosts than there are, and it then waits for ever.
        """
        try:
            answer = self.call("scontrol", "ping")
        except UserError as error:
            answer = str(error)
            if "is DOWN" not in answer:
                raise
        if "is UP" not in answer:
            problem = " ".join(re.sub(r"\*\*.*", "", answer, flags=re.DOTALL).rpartition("failed: ")[2].split())
            raise UserError(f"{self.name}: the controller does not answer ({problem}); try later, or LAUNCH=local")
        chosen = [f"--partition={partition}"] if partition else []
        hosts = sum(int(line) for line in self.call("sinfo", "-h", "-o", "%D", *chosen).split())
        if partition and not hosts:
            raise UserError(f"{self.name} has no partition {partition}; sinfo lists them")
        if nodes + spares > hosts:
            where = f" in partition {partition}" if partition else ""
            size = format_count(hosts, "host")
            asked, most = (f" and elastic.spares={spares}", f"{hosts} in all") if spares else ("", str(hosts))
            raise UserError(f"NODES={nodes}{asked}, but {self.name} has {size}{where}; ask for at most {most}")


def parse_job_fields(text: str) -> dict[str, str]:
    """Parse the fields that `scontrol -o show job` prints."""
    return dict(word.partition("=")[::2] for word in text.split())


def is_configured() -> bool:
    """Check that sbatch has a cluster to talk to: Debian installs it without any."""
    if shutil.which("sbatch") is None:
        return False
    named = os.environ.get("SLURM_CONF")
    return Path(named).exists() if named else any(Path(path).exists() for path in CONFIGURATIONS)


def choose_scheduler(launch: str) -> Scheduler | None:
    """Choose the SLURM for LAUNCH=auto|local|slurm|slurm:NAME; None means processes here. Raises UserError.

    slurm:NAME is the local cluster of that name, of which several may be up. auto takes a local cluster if one is up,
    else SLURM if it is configured. Once SLURM is chosen, one that does not answer is an error and never a silent local
    run.
    """
    kind, _, name = launch.partition(":")
    if kind not in ("auto", "local", "slurm") or (":" in launch and not (kind == "slurm" and name)):
        raise UserError(f"LAUNCH={launch} is unknown; use auto, local, slurm, or slurm:NAME for a local cluster")
    if launch == "local":
        return None
    own = cluster.require_running_cluster(name) if name else cluster.choose_running_cluster()
    if own is None and not is_configured():
        if launch == "auto":
            return None
        missing = "sbatch is not installed" if shutil.which("sbatch") is None else "SLURM has no configuration"
        raise UserError(f"LAUNCH=slurm, but {missing} here; go to a login node, or make cluster-up for a local cluster")
    if own is None:
        return Scheduler("SLURM")
    return Scheduler(LOCAL if own.plan.name == cluster.DEFAULT else f"{LOCAL} {own.plan.name}", own)
