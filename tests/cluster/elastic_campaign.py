"""The campaign of tests/harness/elastic/campaign.py on a local cluster of three hosts.

    python -m tests.cluster.elastic_campaign --cases=30 [--first=K] [--seed=S]      about a minute a case

A job may need several attempts only if no rank with the state is left, or if a rank that serves a shard is lost. Its
log then names this reason. Every job must reproduce the losses of one process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from common.runs.folder import RunFolder
from common.techniques.elastic.coordinator import EndReason
from tests.cluster.lab import Lab, Running, laboratory
from tests.harness.commands.processes import run_experiment
from tests.harness.elastic.campaign import (
    EXPERIMENT_SETTINGS,
    CampaignCase,
    FaultyRun,
    RunLength,
    draw_case,
    parse_arguments,
)
from tests.harness.elastic.faulty_runs import find_metric_differences

PACE = RunLength(steps=800, checkpoint_interval=50, elastic_timeout=3.0, max_first_fault_step=150)
MODEL = (
    "data.name=vectors",
    "data.samples=2400",
    "batch=24",
    "model=mlp",
    "dtype=float64",
    "optim.lr=0.01",
    "optim.base_batch=0",
)
LENGTH = (f"steps={PACE.steps}", f"epochs={PACE.steps // 100}", f"checkpoint.every_steps={PACE.checkpoint_interval}")
JOB_SETTINGS = ("launch.device=cpu", "launch.threads=1", "data.workers=0", "data.block=1")


class JobTarget(FaultyRun):
    """The processes of a job."""

    new_process_timeout = 30.0

    def __init__(self, running: Running) -> None:
        self.running = running
        self.first_processes = list[int]()
        self.known_processes = set[int]()
        self.newest_process = 0
        self.faulty_first_ranks = set[int]()

    def has_ended(self) -> bool:
        return bool(self.running.folder.result)

    def list_rank_pids(self) -> list[int]:
        return self.running.ranks()


def list_settings(name: str) -> tuple[str, ...]:
    """Settings of a run of an experiment, on any number of ranks."""
    return (*MODEL, *LENGTH, *JOB_SETTINGS, *EXPERIMENT_SETTINGS[name])


def run_case(lab: Lab, case: CampaignCase, reference: RunFolder) -> None:
    """Run a case and check its outcome."""
    start_time = time.monotonic()
    nodes = 3 if case.ranks == 3 else 2
    elastic = ("elastic=true", f"elastic.timeout={PACE.elastic_timeout}", f"processes_per_node={case.ranks // nodes}")
    lab.up()
    running = lab.submit_on(nodes, case.name, *list_settings(case.name), *elastic)
    target = JobTarget(running)
    try:
        running.wait_for_step(case.first_fault_step)
        target.record_first_processes()
        target.execute_faults(case)
        running.finish(400)
        case.outcome = check_outcome(running, reference)
    except (AssertionError, TimeoutError) as error:
        case.problem = f"FAILED: {error}; {running.folder.path}"
        for pid in running.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        lab.down()
    case.seconds = time.monotonic() - start_time


def check_outcome(running: Running, reference: RunFolder) -> str:
    """Return how many attempts a job needed, and why. Raises AssertionError."""
    folder = running.folder
    attempts = len(folder.list_attempts())
    assert folder.result.get("state") == "finished", folder.result
    different = find_metric_differences(folder, reference)
    assert not different, different
    if attempts == 1:
        return "equal"
    log_files = [*folder.path.glob("submit/*.out"), *folder.path.glob("submit/*.err")]
    logs = "\n".join(file.read_text(errors="replace") for file in log_files)
    reasons = sorted(reason.name for reason in EndReason if reason.value in logs)
    assert reasons, f"{attempts} attempts without a reason for more than one"
    return f"ended early ({', '.join(reasons)}), equal after {attempts} attempts"


def main() -> int:
    numbers, seed = parse_arguments(__doc__ or "", 30)
    outcomes = dict[str, int]()
    with tempfile.TemporaryDirectory() as scratch, laboratory() as lab:
        references = {}
        for name in EXPERIMENT_SETTINGS:
            settings = (*list_settings(name), f"data.cache={scratch}/cache", "processes_per_node=1")
            references[name] = run_experiment(name, *settings, runs=Path(scratch) / name).folder
        for number in numbers:
            case = draw_case(seed, number, PACE)
            run_case(lab, case, references[case.name])
            print(case.format_line(), flush=True)
            outcome = "failed" if case.problem else case.outcome.partition(",")[0]
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        print(f"seed {seed}, cases {numbers.start} to {numbers.stop - 1} on a cluster: {outcomes}")
        if outcomes.get("failed"):
            raise SystemExit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
