"""Launcher of an elastic job: starts its ranks with srun, and goes on without those that are lost. Imports no torch.

    python -m slurm.scheduling.elastic_launcher RUN_FOLDER srun [OPTIONS] -- COMMAND

The job's script executes it on the first host, where it outlives the ranks: it has their coordinator. srun leaves the
other ranks alone when one ends or a host is lost, so it is the launcher that ends them where one fails by itself.
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
from common.distributed.rank_info import COORDINATOR, JOINS_AS, KEY, ORPHANED
from common.runs.folder import Folder
from common.runs.wandb_tracker import Tracker
from configs.elastic import find_elastic
from configs.shared import Experiment
from slurm.scheduling.scheduler import Scheduler

GRACE = 5.0  # seconds for srun to end after its last rank, and after it was told to
KILLED = 128 + signal.SIGKILL
ALL_RANKS = ("--no-kill", "--wait=0")  # srun goes on without a rank, and without a host
ONE_RANK = ("--overlap", "--open-mode=append", "--nodes=1", "--ntasks=1")
REPLACED = -1  # stands for a rank whose place a new process has taken
HOST_LOST = re.compile(r"error: Node failure on (\S+)")
ENDED = re.compile(r"error: \S+: tasks? ([\d,-]+): (?:Exited with exit code (\d+)|\w+)")


@dataclass
class JobStep:
    """Ranks that one srun started."""

    process: subprocess.Popen[bytes]
    ranks: list[int]
    began: float = field(default_factory=time.monotonic)
    received: bytes = b""
    lost_hosts: set[str] = field(default_factory=set)
    """Hosts that SLURM has taken off the job, of those that the ranks were started on."""

    def read_endings(self) -> Iterator[tuple[int, int]]:
        """Yield each rank that has ended meanwhile, and its exit status; KILLED stands for every signal.

        srun tells of those that did not end with status 0. Its messages go to the job's log.
        """
        assert self.process.stderr is not None
        with contextlib.suppress(BlockingIOError):
            self.received += os.read(self.process.stderr.fileno(), 1 << 16)
        *lines, self.received = self.received.split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            print(text, file=sys.stderr, flush=True)
            if found := HOST_LOST.search(text):
                self.lost_hosts.add(found[1])
            if found := ENDED.search(text):
                for task in expand_numbers(found[1]):
                    yield self.ranks[task], int(found[2] or KILLED)

    def end(self) -> None:
        """End what is left of it: srun ends its ranks where it is told to."""
        for ask in (self.process.terminate, self.process.kill):
            if self.process.poll() is None:
                ask()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE)
        for _ in self.read_endings():
            pass  # its last messages, for the job's log


def expand_numbers(text: str) -> list[int]:
    """Return the numbers of a list such as 0-2,5."""
    ranges = [[int(number) for number in part.split("-")] for part in text.split(",")]
    return [number for one in ranges for number in range(one[0], one[-1] + 1)]


class JobLauncher:
    """The launcher of one attempt of a job."""

    def __init__(self, folder: Folder, cfg: Experiment, command: list[str]) -> None:
        """`command` is that of srun for all ranks, in which `--` separates the options from what a rank executes."""
        settings = find_elastic(cfg)
        assert settings is not None
        self.folder, self.cfg, self.settings = folder, cfg, settings
        at = command.index("--")
        self.options, self.task = command[:at], command[at + 1 :]
        nodes = Scheduler("SLURM").call("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        self.hosts, self.spares = nodes[: cfg.launch.nodes], nodes[cfg.launch.nodes :]
        address = network.resolve_for_others(socket.gethostname(), "the first host of the job", len(nodes))
        key = secrets.token_hex(16)
        listener = open_listener(f"{address}:0", cfg.processes)
        orphaned = [sys.executable, "-m", "slurm.scheduling.orphaned_rank", str(folder.path), nodes[0]]
        own = {COORDINATOR: f"{address}:{listener.getsockname()[1]}", KEY: key, ORPHANED: json.dumps(orphaned)}
        self.environ = os.environ | own
        self.supervisor = Supervisor(
            *(listener, cfg.processes, settings, self.note_silence, self.start_again, key),
            start_timeout=cfg.launch.setup_timeout,
            give_up_start=self.end_start,
        )
        self.coordinator = self.supervisor.coordinator
        self.steps: list[JobStep] = []
        self.killers: list[tuple[float, subprocess.Popen[bytes]]] = []
        """Commands that end silent ranks, and when each began."""
        self.host_of: dict[int, str] = {}
        """Host of each rank, which may be a spare one."""
        self.silent: set[int] = set()
        """Ranks that did not answer, or could not be started again: their hosts may be gone."""
        self.ended: set[int] = set()
        """Ranks that are known to be lost, and not to have failed by themselves."""
        self.tracker: Tracker | None = None
        self.tracked = False
        """True once the tracker was started, or could not be."""
        self.failed = 0
        """Exit status of the first rank that failed by itself, or was lost when the run could not go on without it."""
        self.stopped = False
        """True once a rank has ended on request."""
        self.leaving = False
        """True once SLURM has taken the first host off the job."""

    def run(self) -> int:
        """Start the ranks and wait for them; return the exit status of the job."""
        everyone = list(range(self.cfg.processes))
        hosts = [f"--nodes={len(self.hosts)}", f"--nodelist={','.join(self.hosts)}", f"--ntasks={len(everyone)}"]
        self.start(everyone, self.options, [*ALL_RANKS, *hosts], {})
        self.host_of = {rank: self.hosts[rank * len(self.hosts) // len(everyone)] for rank in everyone}
        try:
            while not self.is_over:
                self.supervisor.poll_and_restart_ranks(self.ended)
                self.note_endings()
                self.forget_failed_starts()
                self.end_killers(GRACE)
                if not self.tracked and self.coordinator.is_active:
                    self.tracked, self.tracker = True, Tracker.start(self.cfg, self.folder.attempts()[-1])
        finally:
            self.end_steps()
        status = self.failed or (EXIT_RESUMABLE if self.stopped else 0 if self.folder.result else KILLED)
        end = self.coordinator.find_end()
        if status == KILLED and end is not None:
            print(end.value, flush=True)
        if self.tracker is not None and self.tracker.folder.is_superseded:
            self.tracker.kill()  # the newer attempt passes on what W&B misses of this one
        elif self.tracker is not None:
            patience = self.cfg.wandb.finish_timeout
            print(self.tracker.finish(min(patience, GRACE) if status == EXIT_RESUMABLE else patience), flush=True)
        return status

    @property
    def is_over(self) -> bool:
        """True once a rank has failed, or no process of a rank is left.

        srun counts ranks as ended whose host SLURM takes for lost, as where its daemon alone has died. They may go on.
        """
        alive = [step for step in self.steps if step.process.poll() is None]
        members = self.coordinator.present - self.coordinator.newcomers  # without any, nobody is left to join
        return bool(self.failed) or (not members and (bool(self.coordinator.number) or not alive))

    def start(self, ranks: list[int], options: list[str], more: list[str], environ: dict[str, str]) -> None:
        """Start ranks in a step of their own."""
        process = subprocess.Popen(
            [*options, *more, *self.task], env=self.environ | environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        self.steps.append(JobStep(process, ranks))

    def start_again(self, rank: int) -> None:
        """Start a rank that was lost: on its host, or on a spare one where the host may be gone."""
        for step in self.steps:
            step.ranks = [REPLACED if one == rank else one for one in step.ranks]
        self.host_of[rank] = host = self.choose_host(rank)
        self.ended.discard(rank)
        self.silent.discard(rank)
        print(f"rank {rank} is started again on {host}", flush=True)
        # unbuffered, srun gives a rank a terminal unless it writes one file a task; and python -u buffers nothing
        options = [word.replace("%t", str(rank)) for word in self.options if word != "--unbuffered"]
        self.start([rank], options, [*ONE_RANK, f"--nodelist={host}"], {JOINS_AS: str(rank)})

    def end_start(self, rank: int) -> None:
        """End the step of a rank that was started again and has not come; `forget_failed_starts` finds it."""
        for step in self.steps:
            if rank in step.ranks:
                step.process.terminate()
                self.ended.add(rank)
                self.silent.add(rank)

    def choose_host(self, rank: int) -> str:
        """Return the rank's last host, or, if that may be gone, the one of its first host and the spares least used."""
        last, moves = self.host_of[rank], rank in self.silent
        first = self.hosts[rank * len(self.hosts) // self.cfg.processes]
        used = collections.Counter(host for other, host in self.host_of.items() if other != rank)
        return min([first, *self.spares], key=lambda host: ((host == last) == moves, used[host]))

    def note_silence(self, rank: int) -> None:
        """Note that a rank does not answer, and end it as far as its host is there: it could wake later, and write."""
        print(f"rank {rank} has not answered for {self.settings.timeout:g} s and is given up", flush=True)
        self.silent.add(rank)
        self.ended.add(rank)
        words = ["srun", "--quiet", *ONE_RANK, f"--nodelist={self.host_of[rank]}", "kill", "-9"]
        command = [*words, str(self.coordinator.find_pid(rank))]
        killer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.killers.append((time.monotonic(), killer))

    def end_killers(self, seconds: float) -> None:
        """Forget the commands that have ended a rank, and end those that wait longer for its host."""
        for began, killer in list(self.killers):
            if killer.poll() is None and time.monotonic() - began > seconds:
                killer.kill()
                killer.wait()
            if killer.returncode is not None:
                self.killers.remove((began, killer))

    def note_endings(self) -> None:
        """Note how ranks have ended that srun tells of."""
        for step in self.steps:
            for rank, status in step.read_endings():
                if rank != REPLACED:
                    self.note_ending(rank, status)
            if self.hosts[0] in step.lost_hosts and not self.leaving:
                self.leave_first_host()
        if self.coordinator.broken:  # SLURM may tell of a host that is gone much later
            self.failed = self.failed or KILLED

    def leave_first_host(self) -> None:
        """Let the ranks save and stop where SLURM has taken this host off the job, as when its daemon has died.

        The daemon, once it is back, would end the job's script, and nothing the job.
        """
        print("SLURM has taken the first host off the job: the ranks are told to save and stop", flush=True)
        self.leaving = True
        for step in self.steps:
            step.process.send_signal(signal.SIGUSR2)  # which srun gives to the ranks

    def note_ending(self, rank: int, status: int) -> None:
        """Note that a rank has ended with another status than 0: stopped on request, lost, or failed by itself.

        A rank that any signal has ended is lost; one that was started again and has not joined may fail in any way.
        """
        if status == EXIT_RESUMABLE:
            self.stopped = True
        elif rank in self.supervisor.starting:
            pass  # it has not joined, and the others go on
        elif (status != KILLED and rank not in self.supervisor.newcomers) or not (
            self.coordinator.note_ended_member(rank)
        ):
            self.failed = self.failed or status
        else:
            self.ended.add(rank)

    def forget_failed_starts(self) -> None:
        """Let a rank whose new start has ended before it joined be started once more, after a moment."""
        for step in self.steps[1:]:
            if step.process.poll() is None or time.monotonic() - step.began < self.settings.timeout:
                continue
            self.note_endings()  # the last it said
            self.steps.remove(step)
            failed = self.supervisor.starting.keys() & set(step.ranks)
            for rank in failed:
                del self.supervisor.starting[rank]
            self.ended |= failed
            self.silent |= failed

    def end_steps(self) -> None:
        """Wait a moment for what is still there, then end it."""
        deadline = time.monotonic() + GRACE
        while (
            not self.failed and time.monotonic() < deadline and any(step.process.poll() is None for step in self.steps)
        ):
            self.note_endings()
            time.sleep(0.05)
        self.note_endings()
        for step in self.steps:  # all at once: SLURM's KillWait may have begun
            step.process.terminate()
        for step in self.steps:  # how they end from now on says nothing about the run
            step.end()
        self.end_killers(0)
        self.coordinator.close()


def main(path: str, command: list[str]) -> int:
    """Launch the ranks of a run; returns the exit status of its job."""
    for number in (signal.SIGTERM, signal.SIGUSR2):  # they are for the ranks, which srun gives them to
        signal.signal(number, lambda *_: None)
    folder = Folder(Path(path))
    given = config.read_config_file(folder.path / "submit" / "config.yaml")
    return JobLauncher(folder, config.build_config(config.import_schema(folder.experiment), [given]), command).run()


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(sys.argv[1], sys.argv[2:]))
