"""Runs tracked by the client of W&B, and its files about them, read with the command `wandb`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from common.runs.folder import RunFolder, read_json
from common.runs.tracking.wandb_process import NO_HOST
from common.runs.tracking.wandb_rows import NOTE_FILE, RowKey, choose_rows, make_row_key
from common.runs.tracking.wandb_run import load_run_config
from tests.harness.commands import execution
from tests.harness.commands.processes import find_processes, get_only_run, make_environment, wait_until
from tests.harness.runs.long_runs import list_rank_pids, start_long_run

API_KEY = "5ec" + "0" * 36 + "7"  # the length of a W&B key


def inspect_wandb_folder(folder: RunFolder, *options: str, place: str = "") -> str:
    """Return the output of `wandb leet inspect` for a run: for the folder `place`, or for the newest one."""
    tool = str(Path(sys.executable).with_name("wandb"))
    argv = [tool, "leet", "inspect", "--json", *options, place or read_tracking_status(folder)["dir"]]
    env = make_environment(HOME=str(folder.path.parent))
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def read_records(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in inspect_wandb_folder(folder).splitlines()]


def select_records(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row[kind] for row in rows if row["type"] == kind]


def read_tracking_status(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.path / "wandb" / "status.json")


def extract_metrics(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of metrics among W&B's records, without the columns that W&B adds."""
    metrics = []
    for record in select_records(rows, "history"):
        columns = {name: value for name, value in record["item"].items() if not name.startswith("_")}
        metrics.append(columns)
    return metrics


def get_exit_code(rows: list[dict[str, Any]]) -> int:
    (record,) = select_records(rows, "exit")
    return int(record.get("exit_code", 0))


def track_finished_run(
    source: RunFolder, place: Path, url: str = "", own: str = "", number: int = 1, keep: bool = False, **changes: Any
) -> tuple[RunFolder, float]:
    """Track an attempt of a copy of a finished run, whose main process has exited. Return its folder and the seconds.

    `own` is the W&B id of a run that was tracked before. `keep` copies the files of its earlier tracking.
    """
    folder = RunFolder(place / source.path.name, number)
    ignored = ["code"] if keep else ["wandb", "code", NOTE_FILE]
    shutil.copytree(source.path, folder.path, ignore=shutil.ignore_patterns(*ignored))
    (folder.path / "wandb").mkdir(exist_ok=True)
    if own:
        (folder.path / "wandb" / "id.json").write_text(json.dumps({"id": own}))
    settings = yaml.safe_load((folder.path / "config.yaml").read_text())
    settings["wandb"] |= changes
    (folder.path / "config.yaml").write_text(yaml.safe_dump(settings))
    online = {"WANDB_BASE_URL": url, "WANDB_API_KEY": API_KEY} if url else {}
    env = make_environment(HOME=str(place), WANDB_ERROR_REPORTING="false", **online)
    del env["WANDB_MODE"]
    started = time.monotonic()
    process = run_tracking(folder, "online" if url else "offline", env)
    if process.returncode == NO_HOST:
        run_tracking(folder, "offline", env)
    wait_until(lambda: not find_processes(str(place)), "all processes have exited")
    return folder, time.monotonic() - started


def run_tracking(folder: RunFolder, mode: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the tracking process of an attempt to its end, after its main process."""
    seconds = str(load_run_config(folder).wandb.finish_timeout)
    arguments = (str(folder.path), str(folder.number), mode, seconds)
    argv = [sys.executable, "-m", "common.runs.tracking.wandb_process", *arguments]
    tracking_env = {name: value for name, value in env.items() if name != "WANDB_MODE"}
    return execution.execute_command(argv, env=tracking_env, timeout=100)


def list_expected_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the rows that W&B should get, oldest first. Steps that were repeated to the bit occur once."""
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
        rows += extract_metrics(
            [json.loads(line) for line in inspect_wandb_folder(folder, place=str(path)).splitlines()]
        )
    return rows


def kill_tracked_rank(
    number: int, settings: tuple[str, ...], place: Path, seconds: float
) -> tuple[execution.Command, RunFolder, int]:
    """Kill a rank of a run that is tracked offline, wait for its processes, and return process, folder and pid."""
    env: dict[str, Any] = {"WANDB_MODE": "offline", "HOME": str(place)}
    with start_long_run("mnist_pipeline", *settings, runs=place / "runs", **env) as process:
        folder = get_only_run(place / "runs")
        wait_until(lambda: read_tracking_status(folder), "the run is tracked")
        wait_until(lambda: len(folder.read_metrics()) > 1, "several rows are written")
        pid = list_rank_pids(process)[number]
        os.kill(pid, signal.SIGKILL)

        def has_exited() -> bool:
            return process.poll() is not None and not find_processes(str(place))

        wait_until(has_exited, "all processes have exited", seconds)
    return process, folder, pid
