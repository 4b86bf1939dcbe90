"""Runs that W&B tracks. Its files are read with the command `wandb`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from common.runs.folder import RunFolder, read_json
from common.runs.tracking.wandb_process import NO_HOST
from common.runs.tracking.wandb_rows import NOTE_FILE, RowKey, choose_rows, make_row_key
from common.runs.tracking.wandb_run import load_run_config
from tests.harness.commands import execution
from tests.harness.commands.processes import WAIT_TIMEOUT, find_processes, get_only_run, make_environment, wait_until
from tests.harness.runs.long_runs import list_rank_pids, start_long_run

API_KEY = "5ec" + "0" * 36 + "7"  # the length of a W&B key
LONG_RUN = (
    *("epochs=1000", "steps=0", "log.seconds=0.1"),
    *("launch.step_timeout=3600", "checkpoint.grace=3600", "wandb.finish_timeout=3600"),
)
"""Settings of a run that trains longer than a test waits, and that no timeout can end before WAIT_TIMEOUT."""


def inspect_wandb_folder(folder: RunFolder, *options: str, wandb_folder: str = "") -> str:
    """Return the output of `wandb leet inspect` for a run: for `wandb_folder`, or for the newest folder."""
    tool = str(Path(sys.executable).with_name("wandb"))
    inspected_folder = wandb_folder or read_tracking_status(folder)["dir"]
    argv = [tool, "leet", "inspect", "--json", *options, inspected_folder]
    env = make_environment(HOME=str(folder.path.parent))
    process = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=WAIT_TIMEOUT)
    return process.stdout


def read_records(folder: RunFolder, wandb_folder: str = "") -> list[dict[str, Any]]:
    """Return the records of a run in `wandb_folder`, or in its newest folder of W&B."""
    output = inspect_wandb_folder(folder, wandb_folder=wandb_folder)
    return [json.loads(line) for line in output.splitlines()]


def select_records(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row[kind] for row in rows if row["type"] == kind]


def read_tracking_status(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.path / "wandb" / "status.json")


def extract_metrics(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of metrics in records of W&B, without the columns that W&B adds."""
    metrics = []
    for record in select_records(rows, "history"):
        columns = {name: value for name, value in record["item"].items() if not name.startswith("_")}
        metrics.append(columns)
    return metrics


def get_exit_code(rows: list[dict[str, Any]]) -> int:
    (record,) = select_records(rows, "exit")
    return int(record.get("exit_code", 0))


def track_finished_run(
    source: RunFolder,
    target_folder: Path,
    url: str = "",
    wandb_id: str = "",
    number: int = 1,
    keep_wandb_files: bool = False,
    **changes: Any,
) -> RunFolder:
    """Track an attempt of a copy of a finished run, whose main process has exited. Return its folder.

    The arguments are those of `prepare_tracking`.
    """
    folder, env = prepare_tracking(source, target_folder, url, wandb_id, number, keep_wandb_files, **changes)
    process = run_tracking(folder, "online" if url else "offline", env)
    if process.returncode == NO_HOST:
        run_tracking(folder, "offline", env)
    wait_until(lambda: not find_processes(str(target_folder)), "all processes have exited")
    return folder


def prepare_tracking(
    source: RunFolder,
    target_folder: Path,
    url: str = "",
    wandb_id: str = "",
    number: int = 1,
    keep_wandb_files: bool = False,
    **changes: Any,
) -> tuple[RunFolder, dict[str, str]]:
    """Copy a finished run. Return the copy, and the environment of its tracking process.

    `url` is the address of the W&B host. `wandb_id` is the W&B ID of a run that was tracked before. `number` is that of
    the attempt. `keep_wandb_files` copies the files of this tracking. `changes` are settings of the group `wandb`.
    """
    folder = RunFolder(target_folder / source.path.name, number)
    ignored = ["code"] if keep_wandb_files else ["wandb", "code", NOTE_FILE]
    shutil.copytree(source.path, folder.path, ignore=shutil.ignore_patterns(*ignored))
    (folder.path / "wandb").mkdir(exist_ok=True)
    if wandb_id:
        (folder.path / "wandb" / "id.json").write_text(json.dumps({"id": wandb_id}))
    settings = yaml.safe_load((folder.path / "config.yaml").read_text())
    settings["wandb"] |= changes
    (folder.path / "config.yaml").write_text(yaml.safe_dump(settings))
    online = {"WANDB_BASE_URL": url, "WANDB_API_KEY": API_KEY} if url else {}
    env = make_environment(HOME=str(target_folder), WANDB_ERROR_REPORTING="false", **online)
    del env["WANDB_MODE"]
    return folder, env


def run_tracking(folder: RunFolder, mode: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the tracking process of an attempt to its end, after its main process."""
    seconds = str(load_run_config(folder).wandb.finish_timeout)
    arguments = (str(folder.path), str(folder.number), mode, seconds)
    argv = [sys.executable, "-m", "common.runs.tracking.wandb_process", *arguments]
    tracking_env = {name: value for name, value in env.items() if name != "WANDB_MODE"}
    return execution.execute_command(argv, env=tracking_env, timeout=100)


def list_expected_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the rows that W&B should receive, oldest first. Equal rows of repeated steps occur once."""
    rows: dict[RowKey, dict[str, Any]] = {}
    for part in folder.list_attempt_parts():
        for number, row in choose_rows(part.attempt):
            is_kept = part.rows is None or number <= part.rows
            if is_kept and part.includes_step(row["global_step"]):
                rows.setdefault(make_row_key(row), row)
    return list(rows.values())


def read_offline_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the rows in all of a run's offline folders, in order."""
    rows = []
    for path in sorted(folder.path.glob("wandb/offline-run-*")):
        rows += extract_metrics(read_records(folder, str(path)))
    return rows


def write_failing_wandb(folder: Path, statements: str = "") -> str:
    """Write a package `wandb` whose import fails after some statements; return the PYTHONPATH that finds it."""
    fake = folder / "fake" / "wandb" / "__init__.py"
    fake.parent.mkdir(parents=True, exist_ok=True)
    fake.write_text(f"{statements}raise OSError(28, 'No space left on device')\n")
    return os.pathsep.join([str(folder / "fake"), os.environ.get("PYTHONPATH", "")])


def kill_tracked_rank(
    rank: int, settings: tuple[str, ...], target_folder: Path
) -> tuple[execution.Command, RunFolder, int]:
    """Kill a rank of a run that is tracked offline, and wait until the run has ended.

    Return the launcher, the run folder and the process ID of the rank.
    """
    env: dict[str, Any] = {"WANDB_MODE": "offline", "HOME": str(target_folder)}
    with start_long_run("mnist_pipeline", *settings, runs=target_folder / "runs", **env) as process:
        folder = get_only_run(target_folder / "runs")
        wait_until(lambda: read_tracking_status(folder), "the run is tracked")
        wait_until(lambda: len(folder.read_metrics()) > 1, "several rows are written")
        pid = list_rank_pids(process)[rank]
        os.kill(pid, signal.SIGKILL)

        def has_exited() -> bool:
            return process.poll() is not None and not find_processes(str(target_folder))

        wait_until(has_exited, "all processes have exited")
    return process, folder, pid
