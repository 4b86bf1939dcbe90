"""Launcher of an elastic job, which starts the ranks with srun and continues without lost ranks.

    python -m slurm.scheduling.elastic_launcher RUN_FOLDER srun [OPTIONS] -- COMMAND

The job script executes the launcher on the first host. The launcher also runs the coordinator, which tracks the ranks.
The launcher therefore outlives the ranks. When a rank exits or a host is lost, srun keeps the other ranks running. When
a rank fails on its own, the launcher therefore terminates the other ranks. This module does not import torch.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.config import config
from common.ranks.rank_info import (
    COORDINATOR_KEY_VARIABLE,
    COORDINATOR_VARIABLE,
    ORPHAN_COMMAND_VARIABLE,
    REPLACED_RANK_VARIABLE,
)
from common.runs.folder import RunFolder
from common.runs.tracking.wandb_tracker import Tracker
from common.system import network
from common.system.errors import exit_on_user_error
from common.system.exit_status import EXIT_RESUMABLE
from common.system.output import discard_unwritable_output
from common.techniques.elastic.supervisor import Supervisor, open_listener
from configs.dataparallel import get_enabled_elastic_settings
from configs.shared import Experiment
from slurm.scheduling.scheduler import Scheduler

GRACE_SECONDS = 5.0
"""Maximum time, in seconds, for srun to exit after its last rank has ended or after a signal."""
KILLED = 128 + signal.SIGKILL
ALL_RANKS = ("--no-kill", "--wait=0")
"""Options with which srun continues after the loss of a rank or host."""
ONE_RANK = ("--overlap", "--open-mode=append", "--nodes=1", "--ntasks=1")
REPLACED = -1
"""Value in `JobStep.ranks` for a rank that was restarted in another step."""
HOST_LOST = re.compile(r"error: Node failure on (\S+)")
TASKS_ENDED = re.compile(r"error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|\w+)")


@dataclass
class JobStep:
    """A job step: the ranks that one srun process has started."""

    process: subprocess.Popen[bytes]
    ranks: list[int]
    """Rank of each task of the step, in the order of the tasks."""
    start_time: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    """Beginning of a message from srun whose end has not been received yet."""
    lost_hosts: set[str] = field(default_factory=set)
    """Hosts that SLURM has removed from the job, as reported by srun."""

    def read_ended_ranks(self) -> Iterator[tuple[int, int]]:
        """Yield each rank that has ended since the last call, and the exit status of the rank.

        If a signal ended the rank, the status is KILLED. srun reports only ranks with a nonzero exit status. The
        messages from srun are copied to the job log.
        """
        assert self.process.stderr is not None
        with contextlib.suppress(BlockingIOError):
            self.unread += os.read(self.process.stderr.fileno(), 1 << 16)
        *lines, self.unread = self.unread.split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            print(text, file=sys.stderr, flush=True)
            if match := HOST_LOST.search(text):
                self.lost_hosts.add(match[1])
            if match := TASKS_ENDED.search(text):
                for task in expand_numbers(match[1]):
                    yield self.ranks[task], int(match[2] or KILLED)

    def terminate(self) -> None:
        """Terminate srun, which terminates its ranks."""
        for send_signal in (self.process.terminate, self.process.kill):
            if self.process.poll() is None:
                send_signal()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE_SECONDS)
        for _ in self.read_ended_ranks():
            pass  # copies the last messages to the job log


def expand_numbers(text: str) -> list[int]:
    """Return the numbers in a SLURM list such as 0-2,5."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


class JobLauncher:
    """Launcher of one attempt of an elastic job."""

    def __init__(self, folder: RunFolder, cfg: Experiment, command: list[str]) -> None:
        """Create the launcher of a run.

        `command` consists of the srun command with the options for all ranks, `--`, and the command of a rank.
        """
        settings = get_enabled_elastic_settings(cfg)
        assert settings is not None
        self.folder = folder
        self.cfg = cfg
        self.settings = settings
        separator = command.index("--")
        self.options = command[:separator]
        self.task = command[separator + 1 :]

        nodes = (
            Scheduler("SLURM").run_command("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        )
        self.hosts = nodes[: cfg.launch.nodes]
        self.spares = nodes[cfg.launch.nodes :]
        address = network.resolve_for_other_hosts(socket.gethostname(), "the first host of the job", len(nodes))
        listener = open_listener(f"{address}:0", cfg.processes)
        key = secrets.token_hex(16)
        orphaned_command = [sys.executable, "-m", "slurm.scheduling.orphaned_rank", str(folder.path), nodes[0]]
        self.environ = os.environ | {
            COORDINATOR_VARIABLE: f"{address}:{listener.getsockname()[1]}",
            COORDINATOR_KEY_VARIABLE: key,
            ORPHAN_COMMAND_VARIABLE: json.dumps(orphaned_command),
        }
        self.supervisor = Supervisor(
            listener,
            cfg.processes,
            settings,
            self.kill_unresponsive_rank,
            self.restart_rank,
            key,
            start_timeout=cfg.launch.setup_timeout,
            give_up_start=self.cancel_restart,
        )
        self.coordinator = self.supervisor.coordinator
        self.steps: list[JobStep] = []
        self.killers: list[tuple[float, subprocess.Popen[bytes]]] = []
        """Start time and process of each command that kills an unresponsive rank."""
        self.host_of: dict[int, str] = {}
        """Host of each rank. The host may be a spare host."""
        self.silent: set[int] = set()
        """Ranks that did not answer or could not be restarted. The hosts of these ranks may be lost."""
        self.lost: set[int] = set()
        """Ranks whose processes are lost, in contrast to ranks that failed on their own."""
        self.tracker: Tracker | None = None
        self.tracker_was_started = False
        """True once the launcher has tried to start the W&B tracker, even if the attempt failed."""
        self.failed_status = 0
        """Exit status of the first rank that failed on its own or whose loss ends the run; 0 if no rank did."""
        self.stopped = False
        """True once a rank has stopped on request."""
        self.leaving = False
        """True once SLURM has removed the first host from the job."""

    def run(self) -> int:
        """Start the ranks, wait until they have ended, and return the exit status of the job."""
        self.start_all_ranks()
        try:
            while not self.is_over:
                self.supervisor.poll_and_restart_ranks(self.lost)
                self.handle_srun_messages()
                self.allow_retry_of_failed_restarts()
                self.reap_kill_commands(GRACE_SECONDS)
                self.start_tracker()
        finally:
            self.terminate_job_steps()
        status = self.choose_exit_status()
        end = self.coordinator.find_end_reason()
        if status == KILLED and end is not None:
            print(end.value, flush=True)
        self.finish_tracker(status)
        return status

    def choose_exit_status(self) -> int:
        """Return the exit status of the job after its ranks have ended."""
        if self.failed_status:
            return self.failed_status
        if self.stopped:
            return EXIT_RESUMABLE
        return 0 if self.folder.result else KILLED

    def start_tracker(self) -> None:
        """Start the W&B tracker if the ranks have formed a process group and the tracker has not been started."""
        if not self.tracker_was_started and self.coordinator.is_active:
            self.tracker_was_started = True
            self.tracker = Tracker.start(self.cfg, self.folder.list_attempts()[-1])

    def finish_tracker(self, status: int) -> None:
        """Wait until the tracker has sent the remaining metrics to W&B."""
        if self.tracker is None:
            return
        if self.tracker.folder.is_superseded:
            self.tracker.kill()  # the newer attempt sends the missing metrics to W&B
            return
        timeout = self.cfg.wandb.finish_timeout
        if status == EXIT_RESUMABLE:
            timeout = min(timeout, GRACE_SECONDS)
        print(self.tracker.finish(timeout), flush=True)

    @property
    def is_over(self) -> bool:
        """True once a rank has failed or no process of a rank remains.

        When the SLURM daemon of a host dies, SLURM considers the host lost, and srun considers the host's ranks ended.
        These ranks may still be running, so their connections to the coordinator are checked first.
        """
        if self.failed_status:
            return True
        if self.coordinator.connected_ranks - self.coordinator.joining_ranks:
            return False
        if self.coordinator.generation_number:  # all members have ended; restarted ranks have no group left to join
            return True
        return all(step.process.poll() is not None for step in self.steps)

    def get_first_host(self, rank: int) -> str:
        """Return the host on which a rank runs at the start of the job."""
        return self.hosts[rank * len(self.hosts) // self.cfg.processes]

    def start_all_ranks(self) -> None:
        """Start all ranks in one job step."""
        ranks = list(range(self.cfg.processes))
        hosts = [f"--nodes={len(self.hosts)}", f"--nodelist={','.join(self.hosts)}", f"--ntasks={len(ranks)}"]
        self.start_job_step(ranks, self.options, [*ALL_RANKS, *hosts], {})
        self.host_of = {rank: self.get_first_host(rank) for rank in ranks}

    def start_job_step(
        self, ranks: list[int], options: list[str], more_options: list[str], environ: dict[str, str]
    ) -> None:
        """Start ranks in a new job step."""
        process = subprocess.Popen(
            options + more_options + self.task,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        self.steps.append(JobStep(process, ranks))

    def restart_rank(self, rank: int) -> None:
        """Restart a lost rank on its last host, or on another host if the last host may be lost."""
        for step in self.steps:
            step.ranks = [REPLACED if other == rank else other for other in step.ranks]
        host = self.choose_restart_host(rank)
        print(f"restarting rank {rank} on {host}", flush=True)
        # With --unbuffered, srun gives a rank a terminal unless each task has its own output file. Python runs with -u,
        # so --unbuffered is not needed.
        options = [option.replace("%t", str(rank)) for option in self.options if option != "--unbuffered"]
        self.start_job_step([rank], options, [*ONE_RANK, f"--nodelist={host}"], {REPLACED_RANK_VARIABLE: str(rank)})
        # If srun could not be started, the rank is still lost, and its last host is unchanged.
        self.host_of[rank] = host
        self.lost.discard(rank)
        self.silent.discard(rank)

    def cancel_restart(self, rank: int) -> None:
        """Terminate the job step of a restarted rank that has not connected to the coordinator.

        Later, `forget_failed_restarts` allows another restart of the rank.
        """
        for step in self.steps:
            if rank in step.ranks:
                step.process.terminate()
                self.lost.add(rank)
                self.silent.add(rank)

    def choose_restart_host(self, rank: int) -> str:
        """Return the host on which a lost rank is restarted.

        A rank is restarted on its last host. If the last host may be lost, the rank is restarted on its first host or
        on a spare host, whichever has the fewest ranks.
        """
        last_host = self.host_of[rank]
        if rank not in self.silent:
            return last_host
        hosts = [host for host in (self.get_first_host(rank), *self.spares) if host != last_host]
        load = collections.Counter(host for other, host in self.host_of.items() if other != rank)
        return min(hosts or [last_host], key=lambda host: load[host])

    def kill_unresponsive_rank(self, rank: int) -> None:
        """Kill a rank that does not answer, because the rank could continue later and write files."""
        print(f"rank {rank} has not answered for {self.settings.timeout:g} s; killing it", flush=True)
        self.silent.add(rank)
        self.lost.add(rank)
        step = ["srun", "--quiet", *ONE_RANK, f"--nodelist={self.host_of[rank]}"]
        command = [*step, "kill", "-9", str(self.coordinator.find_process_id(rank))]
        killer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.killers.append((time.monotonic(), killer))

    def reap_kill_commands(self, timeout: float) -> None:
        """Remove kill commands that have ended, and stop kill commands that have run for `timeout` seconds."""
        for start_time, killer in list(self.killers):
            if killer.poll() is None and time.monotonic() - start_time > timeout:
                killer.kill()
                killer.wait()
            if killer.returncode is not None:
                self.killers.remove((start_time, killer))

    def handle_srun_messages(self) -> None:
        """Process the messages from srun about ended ranks and lost hosts."""
        for step in self.steps:
            for rank, status in step.read_ended_ranks():
                if rank != REPLACED:
                    self.handle_ended_rank(rank, status)
            if self.hosts[0] in step.lost_hosts and not self.leaving:
                self.request_stop_after_loss_of_first_host()
        if self.coordinator.end_reason and not self.failed_status:
            self.failed_status = KILLED  # do not wait for SLURM, which may report a lost host much later

    def request_stop_after_loss_of_first_host(self) -> None:
        """Ask all ranks to save a checkpoint and stop, because SLURM has removed this host from the job.

        If only the SLURM daemon of this host has died, the restarted daemon ends the job script, but not the job.
        """
        print("SLURM has removed the first host from the job; all ranks will save a checkpoint and stop", flush=True)
        self.leaving = True
        for step in self.steps:
            step.process.send_signal(signal.SIGUSR2)  # srun forwards the signal to the ranks

    def handle_ended_rank(self, rank: int, status: int) -> None:
        """Handle a rank that has ended with a nonzero exit status.

        The rank has stopped on request, has failed on its own, or is lost. A rank is lost if a signal ended the rank. A
        restarted rank that has not joined the other ranks is lost regardless of its exit status.
        """
        if status == EXIT_RESUMABLE:
            self.stopped = True
            return
        if rank in self.supervisor.start_times:  # the rank has not connected yet, and the other ranks continue
            return
        is_lost = status == KILLED or rank in self.supervisor.joining_ranks
        if is_lost and self.coordinator.handle_ended_member(rank):
            self.lost.add(rank)
        else:
            self.failed_status = self.failed_status or status

    def allow_retry_of_failed_restarts(self) -> None:
        """Allow another restart of ranks whose last restart ended before the ranks connected.

        The next restart is allowed no earlier than one heartbeat timeout after the last restart.
        """
        for step in self.steps[1:]:
            if step.process.poll() is None or time.monotonic() - step.start_time < self.settings.timeout:
                continue
            self.handle_srun_messages()  # reads the last messages of the step
            self.steps.remove(step)
            failed = self.supervisor.start_times.keys() & set(step.ranks)
            for rank in failed:
                del self.supervisor.start_times[rank]
            self.lost |= failed
            self.silent |= failed

    def terminate_job_steps(self) -> None:
        """Wait up to GRACE_SECONDS for the job steps to end, then terminate them."""
        deadline = time.monotonic() + GRACE_SECONDS
        while not self.failed_status and time.monotonic() < deadline:
            if all(step.process.poll() is not None for step in self.steps):
                break
            self.handle_srun_messages()
            time.sleep(0.05)
        self.handle_srun_messages()
        for step in self.steps:  # SLURM may kill them after KillWait seconds, so terminate all before waiting
            step.process.terminate()
        for step in self.steps:  # the exit statuses of their ranks are ignored
            step.terminate()
        self.reap_kill_commands(0)
        self.coordinator.close()


def main(path: str, command: list[str]) -> int:
    """Launch the ranks of a run, and return the exit status of the job."""
    for number in (signal.SIGTERM, signal.SIGUSR2):  # srun forwards these signals to the ranks
        signal.signal(number, lambda *_: None)
    folder = RunFolder(Path(path))
    settings = config.read_config_file(folder.path / "submit" / "config.yaml")
    cfg = config.build_config(config.import_schema(folder.experiment), [settings])
    return JobLauncher(folder, cfg, command).run()


if __name__ == "__main__":
    discard_unwritable_output()
    with exit_on_user_error():
        sys.exit(main(sys.argv[1], sys.argv[2:]))
