"""Run folders with the files of real runs, written without training."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.config import config, config_keys
from common.runs.folder import RunFolder, write_atomic, write_json
from configs.shared import TrainingExperiment

FIRST_START_TIME = 1_790_000_000.0  # start time of run 0, in seconds since 1970
SECONDS_BETWEEN_RUNS = 3600.0


def write_rows(attempt: RunFolder, rows: Iterable[dict[str, Any]]) -> None:
    """Write the rows of an attempt's metrics."""
    attempt.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclasses.dataclass
class SyntheticRun:
    """A run folder that is written without training.

    The steps are divided among the attempts. Each attempt repeats the last five steps of the previous attempt.
    """

    name: str = "ddp_multinode"
    number: int = 0
    """Runs start in the order of their numbers."""
    steps: int = 200
    attempts: int = 1
    state: str = "finished"
    """finished; or, after half of the steps: failed, running (in the calling process), or lost (without a result)."""
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    step_seconds: float = 0.01
    logged: tuple[str, ...] = ()
    """Names of further values that each step logs."""
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of result.json. Groups such as `measured` are merged with the default entries."""

    def write(self, runs: Path) -> RunFolder:
        """Write the run into a folder of runs."""
        schema = config.import_schema(self.name)
        file_settings = config.read_config_file(config.ROOT / "configs" / f"{self.name}.yaml")
        data_settings = config_keys.drop_training_keys(schema, {"data.name": "digits"})
        changes = data_settings | {"runs": str(runs)} | self.settings
        settings = config.build_config(schema, [file_settings, changes])
        batch = settings.batch if isinstance(settings, TrainingExperiment) else 0
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(FIRST_START_TIME + SECONDS_BETWEEN_RUNS * self.number))
        folder = RunFolder(runs / f"{self.name}-{stamp}-{self.number:04x}")
        folder.path.mkdir(parents=True)
        write_atomic(folder.path / "config.yaml", config.format_yaml(settings))
        trained_steps = self.steps if self.state == "finished" else self.steps // 2
        first_step = 0
        kept_rows = 0
        for number in range(1, self.attempts + 1):
            last_step = round(trained_steps * number / self.attempts)
            attempt = folder.claim_attempt()
            attempt.record_parent_attempt(number - 1 if number > 1 else None, first_step, kept_rows, self.steps)
            self.write_attempt(attempt, first_step, last_step, batch, settings.processes)
            first_step = max(0, last_step - 5)  # the next attempt resumes from a checkpoint of five steps before
            kept_rows = sum(row["global_step"] <= first_step for row in attempt.read_attempt_rows())
        history = {"attempt": self.attempts, "host": os.uname().nodename, "pid": os.getpid(), "pid_started": 0}
        if self.state == "running":
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            history["pid_started"] = int(fields[19])
        write_json(folder.path / "meta.json", {"data": {"name": "digits"}, "history": [history]})
        if self.state in ("finished", "failed"):
            write_json(folder.path / "result.json", self.make_result(trained_steps, batch))
        return folder

    def write_attempt(self, attempt: RunFolder, first_step: int, last_step: int, batch: int, processes: int) -> None:
        """Write the files of an attempt."""
        world = {"processes": processes, "nodes": 1, "hosts": ["vm"] * processes, "device": "cpu"}
        write_json(attempt.attempt_folder / "world.json", world)
        lines = []
        for step in range(first_step + 1, last_step + 1):
            noise = random.Random(self.number * 1_000_003 + step).gauss(0, 0.02)  # a repeated step has the same noise
            loss = 2.3 * math.exp(-3 * step / self.steps) + 0.05 + noise
            seconds = self.step_seconds * (step + 30 * (1 - math.cos(step / 300)))  # increases with every step
            head = f'{{"global_step": {step}, "samples": {step * batch}, "time": {seconds:.6f}'
            further_values = "".join(f', "{name}": {abs(loss) + number:.6g}' for number, name in enumerate(self.logged))
            lines.append(f'{head}, "loss": {loss:.17g}{further_values}}}\n')
            if step % max(1, self.steps // 5) == 0:
                scores = f'"test_loss": {loss:.17g}, "test_accuracy": {1 - loss / 3:.6g}, "test_samples": 10000'
                lines.append(f"{head}, {scores}}}\n")
        attempt.metrics_file.write_text("".join(lines))
        heartbeat_time = time.time() if self.state == "running" else FIRST_START_TIME
        for rank in range(processes):
            attempt.write_heartbeat(rank, last_step, heartbeat_time)
            attempt.log_file(rank).write_text("training started\n")

    def make_result(self, last_step: int, batch: int) -> dict[str, Any]:
        """Return the content of result.json."""
        content: dict[str, Any] = {"format": 2, "state": self.state}
        if self.state == "failed":
            failure = {"exit_status": 1, "last_step": last_step, "reason": "the loss is nan"}
            return content | failure | self.result
        scores = {"test_loss": 0.16, "test_accuracy": 0.96}
        content |= {"exit_status": 0, "data": "digits", "scores": scores}
        content["timings"] = {"samples_per_second": batch / self.step_seconds}
        for name, value in self.result.items():
            if isinstance(value, dict):
                content[name] = content.get(name, {}) | value
            else:
                content[name] = value
        return content


def write_example_runs(runs: Path) -> Path:
    """Write six runs: three finished (one of them after two restarts), one failed, one running, one without steps."""
    pipeline_result: dict[str, Any] = {"measured": {"idle_share": [0.2, 0.4]}}
    pipeline_result["memory"] = {"rank 0": 200_000_000, "rank 1": 300_000_000}
    finished = SyntheticRun("mnist_pipeline", 0, 1000, result=pipeline_result)
    finished.write(runs)
    restarted = dataclasses.replace(finished, number=1, attempts=3, settings={"optim.lr": "0.05"})
    restarted.write(runs)

    data_parallel_result: dict[str, Any] = {"timings": {"step_seconds": 0.05}}
    data_parallel_result["measured"] = {"communication_seconds": 0.02, "communication_exposed": 0.5, "efficiency": 0.9}
    data_parallel_result["memory"] = {"rank 0": 400_000_000, "rank 1": 500_000_000}
    SyntheticRun("ddp_multinode", 2, 600, settings={"strategy": "ddp"}, result=data_parallel_result).write(runs)
    SyntheticRun("ddp_multinode", 3, 1000, state="failed", settings={"strategy": "fsdp"}).write(runs)
    SyntheticRun("ddp_multinode", 4, 1000, state="running", settings={"optim.lr": "0.3"}).write(runs)
    SyntheticRun("ddp_multinode", 5, 0, state="lost").write(runs)
    return runs
