"""Launcher of an elastic job: starts its ranks with srun, and continues without lost ranks. Imports no torch.

    python -m slurm.scheduling.elastic_launcher RUN_FOLDER srun [OPTIONS] -- COMMAND

The job's script executes it on the first host. It outlives the ranks because it hosts their coordinator. srun keeps the
other ranks when one exits or a host is lost, so the launcher ends them when a rank fails by itself.
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

from common.core import config, network
from common.core.errors import EXIT_RESUMABLE, exit_on_user_error
from common.distributed.elastic.supervisor import Supervisor, open_listener
from common.distributed.rank_info import (
    COORDINATOR_KEY_VARIABLE,
    COORDINATOR_VARIABLE,
    ORPHAN_COMMAND_VARIABLE,
    REPLACED_RANK_VARIABLE,
)
from common.runs.folder import RunFolder
from common.runs.wandb_tracker import Tracker
from configs.elastic import find_elastic
from configs.shared import Experiment
from slurm.scheduling.scheduler import Scheduler

GRACE_SECONDS = 5.0
"""Time for srun to end after its last rank, and after a signal."""
KILLED = 128 + signal.SIGKILL
ALL_RANKS = ("--no-kill", "--wait=0")
"""Options of srun to continue without a lost rank or host."""
ONE_RANK = ("--overlap", "--open-mode=append", "--nodes=1", "--ntasks=1")
REPLACED = -1
"""In the ranks of a step, a rank that was restarted in another step."""
HOST_LOST = re.compile(r"error: Node failure on (\S+)")
TASKS_ENDED = re.compile(r"error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|\w+)")


@dataclass
class JobStep:
    """Ranks that one srun started."""

    process: subprocess.Popen[bytes]
    ranks: list[int]
    """Rank of each task."""
    start_time: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    """The beginning of a message of srun."""
    lost_hosts: set[str] = field(default_factory=set)
    """Hosts of the ranks that SLURM has removed from the job."""

    def read_endings(self) -> Iterator[tuple[int, int]]:
        """Yield each rank that has ended since the last call, and its exit status.

        KILLED stands for every signal. srun reports only ranks whose status is not 0. Its messages are copied to the
        job's log.
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

    def end(self) -> None:
        """End srun, which ends its ranks."""
        for send_signal in (self.process.terminate, self.process.kill):
            if self.process.poll() is None:
                send_signal()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE_SECONDS)
        for _ in self.read_endings():
            pass  # copies the last messages to the job's log


def expand_numbers(text: str) -> list[int]:
    """Return the numbers of a list such as 0-2,5."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


class JobLauncher:
    """The launcher of one attempt of a job."""

    def __init__(self, folder: RunFolder, cfg: Experiment, command: list[str]) -> None:
        """`command` is that of srun for all ranks: its options, `--`, the command of a rank."""
        settings = find_elastic(cfg)
        assert settings is not None
        self.folder = folder
        self.cfg = cfg
        self.settings = settings
        separator = command.index("--")
        self.options = command[:separator]
        self.task = command[separator + 1 :]

        nodes = Scheduler("SLURM").call("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
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
            self.end_silent_rank,
            self.restart_rank,
            key,
            start_timeout=cfg.launch.setup_timeout,
            give_up_start=self.cancel_restart,
        )
        self.coordinator = self.supervisor.coordinator
        self.steps: list[JobStep] = []
        self.killers: list[tuple[float, subprocess.Popen[bytes]]] = []
        """Start times and processes of the commands that end silent ranks."""
        self.host_of: dict[int, str] = {}
        """Host of each rank; may be a spare."""
        self.silent: set[int] = set()
        """Ranks that did not answer or could not be restarted; their hosts may be gone."""
        self.lost: set[int] = set()
        """Ranks whose processes are lost, in contrast to failed."""
        self.tracker: Tracker | None = None
        self.tracker_was_started = False
        """True also if the tracker could not be started."""
        self.failed_status = 0
        """Exit status of the first rank that failed by itself, or whose loss the run cannot survive."""
        self.stopped = False
        """True once a rank has stopped on request."""
        self.leaving = False
        """True once SLURM has removed the first host from the job."""

    def run(self) -> int:
        """Start the ranks and wait for them; returns the exit status of the job."""
        self.start_all_ranks()
        try:
            while not self.is_over:
                self.supervisor.poll_and_restart_ranks(self.lost)
                self.note_endings()
                self.forget_failed_restarts()
                self.reap_killers(GRACE_SECONDS)
                self.start_tracker()
        finally:
            self.end_steps()
        status = self.choose_exit_status()
        end = self.coordinator.find_end_reason()
        if status == KILLED and end is not None:
            print(end.value, flush=True)
        self.finish_tracker(status)
        return status

    def choose_exit_status(self) -> int:
        """Return the exit status of the job, once its ranks have ended."""
        if self.failed_status:
            return self.failed_status
        if self.stopped:
            return EXIT_RESUMABLE
        return 0 if self.folder.result else KILLED

    def start_tracker(self) -> None:
        """Start the tracker, once, when the ranks have met."""
        if not self.tracker_was_started and self.coordinator.is_active:
            self.tracker_was_started = True
            self.tracker = Tracker.start(self.cfg, self.folder.list_attempts()[-1])

    def finish_tracker(self, status: int) -> None:
        """Wait for the tracker to send the rest of the metrics."""
        if self.tracker is None:
            return
        if self.tracker.folder.is_superseded:
            self.tracker.kill()  # the newer attempt sends the metrics that W&B is missing
            return
        timeout = self.cfg.wandb.finish_timeout
        if status == EXIT_RESUMABLE:
            timeout = min(timeout, GRACE_SECONDS)
        print(self.tracker.finish(timeout), flush=True)

    @property
    def is_over(self) -> bool:
        """True once a rank has failed, or no process of a rank remains.

        When the daemon of a host dies, SLURM considers the host lost and srun its ranks ended, but they may still run.
        """
        if self.failed_status:
            return True
        if self.coordinator.connected_ranks - self.coordinator.joining_ranks:
            return False
        if self.coordinator.generation_number:  # the ranks had met; newcomers alone have no rank to join
            return True
        return all(step.process.poll() is not None for step in self.steps)

    def get_first_host(self, rank: int) -> str:
        """Return the host on which a rank is started first."""
        return self.hosts[rank * len(self.hosts) // self.cfg.processes]

    def start_all_ranks(self) -> None:
        """Start all ranks in one step."""
        ranks = list(range(self.cfg.processes))
        hosts = [f"--nodes={len(self.hosts)}", f"--nodelist={','.join(self.hosts)}", f"--ntasks={len(ranks)}"]
        self.start(ranks, self.options, [*ALL_RANKS, *hosts], {})
        self.host_of = {rank: self.get_first_host(rank) for rank in ranks}

    def start(self, ranks: list[int], options: list[str], more_options: list[str], environ: dict[str, str]) -> None:
        """Start ranks in a new step."""
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
        """Start a lost rank again: on its host, or on a spare if its host may be gone."""
        for step in self.steps:
            step.ranks = [REPLACED if other == rank else other for other in step.ranks]
        host = self.choose_host(rank)
        self.host_of[rank] = host
        self.lost.discard(rank)
        self.silent.discard(rank)
        print(f"rank {rank} is started again on {host}", flush=True)
        # With --unbuffered, srun gives a rank a terminal unless each task has its own file; python -u needs neither.
        options = [option.replace("%t", str(rank)) for option in self.options if option != "--unbuffered"]
        self.start([rank], options, [*ONE_RANK, f"--nodelist={host}"], {REPLACED_RANK_VARIABLE: str(rank)})

    def cancel_restart(self, rank: int) -> None:
        """End the step of a restarted rank that has not connected; `forget_failed_restarts` handles the rest."""
        for step in self.steps:
            if rank in step.ranks:
                step.process.terminate()
                self.lost.add(rank)
                self.silent.add(rank)

    def choose_host(self, rank: int) -> str:
        """Return the host on which a lost rank is restarted.

        It is the last host of the rank, or, if that may be gone, another one with the fewest ranks. The other hosts for
        a rank are its first one and the spares.
        """
        last_host = self.host_of[rank]
        if rank not in self.silent:
            return last_host
        hosts = [host for host in (self.get_first_host(rank), *self.spares) if host != last_host]
        load = collections.Counter(host for other, host in self.host_of.items() if other != rank)
        return min(hosts or [last_host], key=lambda host: load[host])

    def end_silent_rank(self, rank: int) -> None:
        """Kill a rank that does not answer, because it could wake up later and write."""
        print(f"rank {rank} has not answered for {self.settings.timeout:g} s; killing it", flush=True)
        self.silent.add(rank)
        self.lost.add(rank)
        step = ["srun", "--quiet", *ONE_RANK, f"--nodelist={self.host_of[rank]}"]
        command = [*step, "kill", "-9", str(self.coordinator.find_pid(rank))]
        killer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.killers.append((time.monotonic(), killer))

    def reap_killers(self, timeout: float) -> None:
        """Forget the kill commands that have ended; end those that have waited `timeout` seconds for a host."""
        for start_time, killer in list(self.killers):
            if killer.poll() is None and time.monotonic() - start_time > timeout:
                killer.kill()
                killer.wait()
            if killer.returncode is not None:
                self.killers.remove((start_time, killer))

    def note_endings(self) -> None:
        """Handle the messages of srun about ended ranks and lost hosts."""
        for step in self.steps:
            for rank, status in step.read_endings():
                if rank != REPLACED:
                    self.note_ending(rank, status)
            if self.hosts[0] in step.lost_hosts and not self.leaving:
                self.leave_first_host()
        if self.coordinator.end_reason and not self.failed_status:
            self.failed_status = KILLED  # SLURM may report a lost host much later

    def leave_first_host(self) -> None:
        """Request the ranks to save and stop after SLURM has removed this host from the job.

        If only its daemon has died, the daemon ends the job's script after its restart, but not the job.
        """
        print("SLURM has removed the first host from the job; the ranks save and stop", flush=True)
        self.leaving = True
        for step in self.steps:
            step.process.send_signal(signal.SIGUSR2)  # srun passes it to the ranks

    def note_ending(self, rank: int, status: int) -> None:
        """Note that a rank has ended with a status other than 0.

        It has stopped on request, failed by itself, or is lost. A rank is lost if a signal ended it. A restarted one
        that has not joined is lost whatever its status.
        """
        if status == EXIT_RESUMABLE:
            self.stopped = True
            return
        if rank in self.supervisor.start_times:  # it has not joined, and the others continue
            return
        is_lost = status == KILLED or rank in self.supervisor.joining_ranks
        if is_lost and self.coordinator.handle_ended_member(rank):
            self.lost.add(rank)
        else:
            self.failed_status = self.failed_status or status

    def forget_failed_restarts(self) -> None:
        """Allow the next restart of ranks whose restart ended before they joined, not before the heartbeat timeout."""
        for step in self.steps[1:]:
            if step.process.poll() is None or time.monotonic() - step.start_time < self.settings.timeout:
                continue
            self.note_endings()  # reads its last messages
            self.steps.remove(step)
            failed = self.supervisor.start_times.keys() & set(step.ranks)
            for rank in failed:
                del self.supervisor.start_times[rank]
            self.lost |= failed
            self.silent |= failed

    def end_steps(self) -> None:
        """Wait for the steps for a moment, then end them."""
        deadline = time.monotonic() + GRACE_SECONDS
        while not self.failed_status and time.monotonic() < deadline:
            if all(step.process.poll() is not None for step in self.steps):
                break
            self.note_endings()
            time.sleep(0.05)
        self.note_endings()
        for step in self.steps:  # all at once: SLURM's KillWait may have begun
            step.process.terminate()
        for step in self.steps:  # ignore how their ranks end
            step.end()
        self.reap_killers(0)
        self.coordinator.close()


def main(path: str, command: list[str]) -> int:
    """Launch the ranks of a run; returns the exit status of its job."""
    for number in (signal.SIGTERM, signal.SIGUSR2):  # srun passes them to the ranks
        signal.signal(number, lambda *_: None)
    folder = RunFolder(Path(path))
    settings = config.read_config_file(folder.path / "submit" / "config.yaml")
    cfg = config.build_config(config.import_schema(folder.experiment), [settings])
    return JobLauncher(folder, cfg, command).run()


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(sys.argv[1], sys.argv[2:]))
