"""Run folders as real runs leave them, made without training."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from pathlib import Path
from typing import Any

from common.config import config, config_keys
from common.runs.folder import RunFolder, write_atomic, write_json
from configs.shared import TrainingExperiment

STARTED = 1_790_000_000.0  # seconds since 1970: the first run
EVERY = 3600.0  # seconds between two runs


@dataclasses.dataclass
class Made:
    """One run that never ran. `attempts` starts share its steps, each redoing the last few of the one before."""

    name: str = "ddp_multinode"
    number: int = 0
    steps: int = 200
    attempts: int = 1
    state: str = "finished"
    """finished; or, half-way: failed, running (in the process that makes it), or lost without a word."""
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    step_seconds: float = 0.01
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of result.json; groups such as `measured` are merged with the usual ones."""

    def write(self, runs: Path) -> RunFolder:
        schema = config.import_schema(self.name)
        values = config.read_config_file(config.ROOT / "configs" / f"{self.name}.yaml")
        data = config_keys.drop_training_keys(schema, {"data.name": "digits"})
        settings = config.build_config(schema, [values, data | {"runs": str(runs)} | self.settings])
        batch = settings.batch if isinstance(settings, TrainingExperiment) else 0
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(STARTED + EVERY * self.number))
        folder = RunFolder(runs / f"{self.name}-{stamp}-{self.number:04x}")
        folder.path.mkdir(parents=True)
        write_atomic(folder.path / "config.yaml", config.format_yaml(settings))
        done = self.steps if self.state == "finished" else self.steps // 2
        bounds = [round(done * (i + 1) / self.attempts) for i in range(self.attempts)]
        begin, rows = 0, 0
        for number, bound in enumerate(bounds, 1):
            attempt = folder.claim_attempt()
            attempt.record_parent_attempt(number - 1 if number > 1 else None, begin, rows)
            self.train(attempt, begin, bound, batch, settings.processes)
            begin = max(0, bound - 5)  # the next start goes on from a checkpoint of five steps ago
            rows = sum(row["global_step"] <= begin for row in attempt.read_attempt_rows())
        history = {"attempt": self.attempts, "host": os.uname().nodename, "pid": os.getpid(), "pid_started": 0}
        if self.state == "running":
            history["pid_started"] = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        write_json(folder.path / "meta.json", {"data": {"name": "digits"}, "history": [history]})
        if self.state in ("finished", "failed"):
            write_json(folder.path / "result.json", self.ending(done, batch))
        return folder

    def train(self, attempt: RunFolder, begin: int, end: int, batch: int, processes: int) -> None:
        """Write one start's files."""
        world = {"processes": processes, "nodes": 1, "hosts": ["vm"] * processes, "device": "cpu"}
        write_json(attempt.attempt_folder / "world.json", world)
        lines = []
        for step in range(begin + 1, end + 1):
            noise = random.Random(self.number * 1_000_003 + step).gauss(0, 0.02)  # the same when the step is done again
            loss = 2.3 * math.exp(-3 * step / self.steps) + 0.05 + noise
            seconds = self.step_seconds * (step + 30 * (1 - math.cos(step / 300)))  # never backwards
            head = f'{{"global_step": {step}, "samples": {step * batch}, "time": {seconds:.6f}'
            lines.append(f'{head}, "loss": {loss:.17g}}}\n')
            if step % max(1, self.steps // 5) == 0:
                scores = f'"test_loss": {loss:.17g}, "test_accuracy": {1 - loss / 3:.6g}, "test_samples": 10000'
                lines.append(f"{head}, {scores}}}\n")
        attempt.metrics_file.write_text("".join(lines))
        for rank in range(processes):
            attempt.write_heartbeat(rank, end, time.time() if self.state == "running" else STARTED)
            attempt.log_file(rank).write_text("it began\n")

    def ending(self, done: int, batch: int) -> dict[str, Any]:
        content: dict[str, Any] = {"format": 2, "state": self.state}
        if self.state == "failed":
            return content | {"exit_status": 1, "last_step": done, "reason": "the loss is nan"} | self.result
        content |= {"exit_status": 0, "data": "digits", "scores": {"test_loss": 0.16, "test_accuracy": 0.96}}
        content["timings"] = {"samples_per_second": batch / self.step_seconds}
        for name, value in self.result.items():
            content[name] = content.get(name, {}) | value if isinstance(value, dict) else value
        return content


def write_six(runs: Path) -> Path:
    """Runs of different length, one restarted, one running, one broken, one that never began; returns `runs`."""
    pipeline = {"measured": {"idle_share": [0.2, 0.4]}, "memory": {"rank 0": 200_000_000, "rank 1": 300_000_000}}
    Made("mnist_pipeline", 0, 1000, result=pipeline).write(runs)
    Made("mnist_pipeline", 1, 1000, attempts=3, settings={"optim.lr": "0.05"}, result=pipeline).write(runs)
    measured = {"communication_seconds": 0.02, "communication_exposed": 0.5, "efficiency": 0.9}
    exchanged: dict[str, Any] = {"measured": measured, "timings": {"step_seconds": 0.05}}
    exchanged["memory"] = {"rank 0": 400_000_000, "rank 1": 500_000_000}
    Made("ddp_multinode", 2, 600, settings={"strategy": "ddp"}, result=exchanged).write(runs)
    Made("ddp_multinode", 3, 1000, state="failed", settings={"strategy": "fsdp"}).write(runs)
    Made("ddp_multinode", 4, 1000, state="running", settings={"optim.lr": "0.3"}).write(runs)
    Made("ddp_multinode", 5, 0, state="lost").write(runs)
    return runs
