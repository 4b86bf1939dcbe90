"""Seconds that a lost rank or host costs a job with elastic=true, and a job that is requeued instead.

    python -m tests.cluster.elastic_times [--kills=10] [--rounds=5] [--requeues=5]
    python -m tests.cluster.elastic_times --minutes=10

A time ends when metrics.jsonl contains a step that was taken after the fault. With --minutes, a random rank is killed
every 15 s as long as at least two ranks are left, and nothing is timed. The losses of all elastic runs are compared
with those of one process. The table is written to tests/benchmarks/results/.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from common.runs.folder import RunFolder
from common.runs.rank_changes import read_rank_changes
from configs.dataparallel import Elastic
from tests.benchmarks.measure import summarize_values
from tests.benchmarks.records import Record, Row, Table
from tests.cluster.lab import Lab, Running, laboratory, time_step_after
from tests.harness.commands.processes import run_experiment
from tests.harness.elastic.faulty_runs import find_metric_differences
from tests.harness.slurm.cluster_site import wait_on_cluster

MODEL = ("data.name=vectors", "data.samples=24000", "batch=24", "model=mlp", "dtype=float64", "optim.lr=0.01")
SETTINGS = (*MODEL, "optim.base_batch=0", "data.workers=0", "launch.device=cpu", "launch.threads=1")
ELASTIC = ("elastic=true", "elastic.rejoin=1000")
STEPS_PER_SECOND = 90  # more than a run reaches, so that it does not end early
SECONDS_BETWEEN_KILLS = 15.0
TIMEOUT = Elastic().timeout
Seconds = dict[str, list[float]]


def start(lab: Lab, nodes: int, steps: int, *settings: str) -> Running:
    """Submit a run of `steps` steps, with one epoch for each thousand."""
    length = (f"steps={steps}", f"epochs={-(-steps // 1000)}", "log.seconds=0.05", "checkpoint.every_steps=100")
    running = lab.submit_on(nodes, "ddp_multinode", *SETTINGS, *length, *settings)
    running.wait_for_step(20)
    return running


def kill(running: Running, rank: int) -> None:
    os.kill(running.ranks()[rank], signal.SIGKILL)


def wait_until_complete(running: Running) -> None:
    """Wait until all three ranks train."""
    wait_on_cluster("three ranks train", lambda: len(read_rank_changes(running.newest())[-1]["ranks"]) == 3, 60, 0.1)
    step = running.step()
    running.wait_for_step(step + 20)


def measure_stalls(folder: RunFolder) -> list[float]:
    """Return how much longer than usual the step after each join took, in seconds."""
    times = {row["global_step"]: row["time"] for row in folder.read_metrics() if "loss" in row}
    usual = median(times[step] - times[step - 1] for step in times if step - 1 in times)
    changes = folder.result["measured"]["generations"]
    joins = [change["step"] for change in changes if change["joined"] and not change["lost"]]
    return [times[step + 1] - times[step] - usual for step in joins if step + 1 in times]


def check_losses(running: Running, steps: int) -> None:
    """Raise ValueError if the losses differ from those of one process."""
    with tempfile.TemporaryDirectory() as runs:
        settings = (*SETTINGS, f"steps={steps}", f"epochs={-(-steps // 1000)}", f"data.cache={runs}/cache")
        reference = run_experiment(
            "ddp_multinode", *settings, "processes_per_node=1", runs=Path(runs) / "runs", timeout=600
        )
        different = find_metric_differences(running.folder, reference.folder)
    if different:
        raise ValueError(f"{running.folder.path}: {different[:3]}")


def time_fault(running: Running, strike: Callable[[], object]) -> float:
    """Cause a fault; return the seconds until the run has taken another step."""
    seconds, _ = time_step_after(running, strike)
    return seconds


def measure_kills(lab: Lab, kills: int, seconds: Seconds) -> None:
    steps = 600 + 700 * kills
    running = start(lab, 3, steps, *ELASTIC)
    for number in range(kills):
        seconds["kill -9 of a rank"].append(time_fault(running, functools.partial(kill, running, number % 3)))
        wait_until_complete(running)
    running.finish()
    seconds["join"] += measure_stalls(running.folder)
    check_losses(running, steps)


def measure_hosts(lab: Lab, rounds: int, seconds: Seconds) -> None:
    """Cut and join a host, then power it off, in one run per round."""
    for _ in range(rounds):
        running = start(lab, 3, 1500, *ELASTIC)
        host = running.hosts()[2]
        seconds["cable cut"].append(time_fault(running, functools.partial(lab.tool, "cut", host)))
        lab.tool("join", host)
        wait_until_complete(running)
        seconds["power-off of a host"].append(time_fault(running, functools.partial(lab.tool, "power-off", host)))
        running.finish()
        check_losses(running, 1500)
        lab.tool("power-on", host)


def measure_requeues(lab: Lab, rounds: int, seconds: Seconds) -> None:
    """Cause the same faults in runs on two of the three hosts, which are requeued."""
    faults: dict[str, Callable[[Running], object]] = {
        "kill -9 of a rank": lambda running: kill(running, 1),
        "cable cut": lambda running: lab.tool("cut", running.hosts()[1]),
        "power-off of a host": lambda running: lab.tool("power-off", running.hosts()[1]),
    }
    for _ in range(rounds):
        for name, cause_fault in faults.items():
            running = start(lab, 2, 100_000)
            host = running.hosts()[1]
            seconds[name].append(time_fault(running, functools.partial(cause_fault, running)))
            lab.command("cancel", str(running.folder.path))
            wait_on_cluster("no rank is left", lambda: not running.ranks(), 60, 0.2)  # noqa: B023
            if name != "kill -9 of a rank":
                lab.tool("join" if name == "cable cut" else "power-on", host)


def kill_at_random(lab: Lab, minutes: float) -> Table:
    """Kill a random rank every 15 s; return the table of the run. Raises ValueError if the losses differ."""
    steps = round(minutes * 60 * STEPS_PER_SECOND)
    running = start(lab, 3, steps, *ELASTIC)
    start_time = time.monotonic()
    kills = 0
    while time.monotonic() < start_time + 60 * minutes and not running.folder.result:
        time.sleep(SECONDS_BETWEEN_KILLS)
        ranks = running.ranks()
        changes = read_rank_changes(running.newest())
        if (not changes or len(changes[-1]["ranks"]) > 1) and not running.folder.result:
            os.kill(random.SystemRandom().choice(ranks), signal.SIGKILL)
            kills += 1
    minutes_of_kills = (time.monotonic() - start_time) / 60
    running.finish(3600)
    attempts = len(running.folder.list_attempts())
    if attempts > 1:
        raise ValueError(f"{running.folder.path}: {attempts} attempts")
    check_losses(running, steps)
    measured = running.folder.result["measured"]
    joined = sum(len(change["joined"]) for change in measured["generations"])
    cells = [str(kills), str(joined), str(steps), str(measured["steps_redone"]), "yes"]
    columns = ("minutes", "kills", "ranks that joined", "steps", "steps repeated", "losses equal to within 1e-9")
    return Table(columns, [Row(f"{minutes_of_kills:.1f}", cells)])


def tabulate(elastic: Seconds, requeued: Seconds) -> Table:
    """Return the table of the page; goals are 1 s, or the timeout plus 1 s."""
    goals = {"kill -9 of a rank": 1.0, "join": 1.0, "cable cut": TIMEOUT + 1, "power-off of a host": TIMEOUT + 1}
    rows = []
    for name, goal in goals.items():
        cells = [summarize_values(seconds) if seconds else "-" for seconds in (elastic[name], requeued[name])]
        rows.append(Row(name, cells, goal, at_least=False))
    return Table(("event", "elastic: s to the next step", "requeued: s to the next step"), rows)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.elastic_times")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requeues", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=0)
    options = parser.parse_args(arguments)
    names = ("kill -9 of a rank", "join", "cable cut", "power-off of a host")
    elastic: Seconds = {name: [] for name in names}
    requeued: Seconds = {name: [] for name in names}
    command = f"python -m tests.cluster.elastic_times {' '.join(arguments)}"
    with laboratory() as lab:
        lab.up()
        if options.minutes:
            about = {"title": "kills", "command": command}
            Record().put_table("cluster/kills", about, kill_at_random(lab, options.minutes))
            return 0
        measure_kills(lab, options.kills, elastic)
        measure_hosts(lab, options.rounds, elastic)
        measure_requeues(lab, options.requeues, requeued)
    print(elastic, requeued, flush=True)
    about = {"title": "losing a rank or a host", "command": command, "rounds": options.rounds}
    record = about | {"seconds": {"elastic": elastic, "queued again": requeued}}
    Record().put_table("cluster/elastic", record, tabulate(elastic, requeued))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
