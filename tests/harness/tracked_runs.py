"""Runs that W&B's client follows, and what it wrote about them, read back with its own tool."""

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
from tests.harness import warm
from tests.harness.long_runs import only_folder, ranks_of, train_long
from tests.harness.processes import environment, processes_of, wait_until

SECRET = "5ec" + "0" * 36 + "7"  # as long as a key of W&B


def inspect(folder: RunFolder, *options: str, place: str = "") -> str:
    """What W&B wrote about a run, by default at last, read back with its own tool."""
    tool = str(Path(sys.executable).with_name("wandb"))
    words = [tool, "leet", "inspect", "--json", *options, place or status(folder)["dir"]]
    env = environment(HOME=str(folder.path.parent))
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def records(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in inspect(folder).splitlines()]


def of_type(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row[kind] for row in rows if row["type"] == kind]


def status(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.path / "wandb" / "status.json")


def history(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of metrics among W&B's records, without its own columns."""
    items = [record["item"] for record in of_type(rows, "history")]
    return [{name: value for name, value in item.items() if not name.startswith("_")} for item in items]


def exit_code(rows: list[dict[str, Any]]) -> int:
    (record,) = of_type(rows, "exit")
    return int(record.get("exit_code", 0))


def track(
    source: RunFolder, place: Path, url: str = "", own: str = "", number: int = 1, keep: bool = False, **changes: Any
) -> tuple[RunFolder, float]:
    """Track a start of a copy of a finished run, with its owner gone already; returns its folder and the seconds it
    took.

    With a W&B id of its `own`, it is one that was tracked before; `keep` copies what its tracking left.
    """
    folder = RunFolder(place / source.path.name, number)
    left_out = ["code"] if keep else ["wandb", "code", NOTE_FILE]
    shutil.copytree(source.path, folder.path, ignore=shutil.ignore_patterns(*left_out))
    (folder.path / "wandb").mkdir(exist_ok=True)
    if own:
        (folder.path / "wandb" / "id.json").write_text(json.dumps({"id": own}))
    settings = yaml.safe_load((folder.path / "config.yaml").read_text())
    settings["wandb"] |= changes
    (folder.path / "config.yaml").write_text(yaml.safe_dump(settings))
    online = {"WANDB_BASE_URL": url, "WANDB_API_KEY": SECRET} if url else {}
    env = environment(HOME=str(place), WANDB_ERROR_REPORTING="false", **online)
    del env["WANDB_MODE"]
    start = time.monotonic()
    done = run_tracking(folder, "online" if url else "offline", env)
    if done.returncode == NO_HOST:
        run_tracking(folder, "offline", env)
    wait_until(lambda: not processes_of(str(place)), "no process is left")
    return folder, time.monotonic() - start


def run_tracking(folder: RunFolder, mode: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the tracking process of an attempt to its end; its owner is gone."""
    seconds = str(load_run_config(folder).wandb.finish_timeout)
    argv = [
        sys.executable,
        "-m",
        "common.runs.tracking.wandb_process",
        str(folder.path),
        str(folder.number),
        mode,
        seconds,
    ]
    return warm.execute(argv, env={key: value for key, value in env.items() if key != "WANDB_MODE"}, timeout=100)


def chosen_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of a run that W&B is to get, oldest first; steps that were done again to the bit come once."""
    rows: dict[RowKey, dict[str, Any]] = {}
    for part in folder.list_attempt_parts():
        for number, row in choose_rows(part.attempt):
            if (part.rows is None or number <= part.rows) and part.includes_step(row["global_step"]):
                rows.setdefault(make_row_key(row), row)
    return list(rows.values())


def offline_history(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows in all of a run's offline folders, in their order."""
    found = []
    for path in sorted(folder.path.glob("wandb/offline-run-*")):
        found += history([json.loads(line) for line in inspect(folder, place=str(path)).splitlines()])
    return found


def kill_rank(number: int, words: tuple[str, ...], place: Path, seconds: float) -> tuple[warm.Command, RunFolder, int]:
    """Kill a rank of a run that is tracked offline, and wait until all of it has ended; returns the rank's pid, too."""
    env: dict[str, Any] = {"WANDB_MODE": "offline", "HOME": str(place)}
    with train_long("mnist_pipeline", *words, runs=place / "runs", **env) as process:
        folder = only_folder(place / "runs")
        wait_until(lambda: status(folder), "it is tracked")
        wait_until(lambda: len(folder.read_metrics()) > 1, "more than the first row is written")
        pid = ranks_of(process)[number]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: process.poll() is not None and not processes_of(str(place)), "all has ended", seconds)
    return process, folder, pid
