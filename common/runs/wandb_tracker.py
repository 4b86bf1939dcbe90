"""Tracking by Weights & Biases: a process of its own follows metrics.jsonl and forwards its rows.

    python -m common.runs.wandb_tracker RUN_FOLDER ATTEMPT MODE REASON    (started by the run; ends when stdin closes)

Training never waits for W&B and cannot fail with it, and a rank that is killed takes no record along: this process
outlives it, forwards the rows that are in the file, and closes the W&B run as failed. Account and host are checked
before wandb.init, because a failing online init takes a minute and a half. Imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.core.errors import UserError, summarize_error
from common.core.processes import adopt_orphans, kill_children
from common.runs.folder import Folder, read_json, write_json
from common.runs.result import parse_result
from common.runs.wandb_account import choose_mode, read_requested_mode
from common.runs.wandb_run import MediaForwarder, init_wandb_run, load_run_config, log_model_artifact
from configs.shared import Experiment

FORWARDED = "passed_on.json"  # in an attempt's folder: the number of its rows that W&B has
SERVICE = "WANDB_SERVICE"  # names the helper process of an earlier wandb
POLL = 0.3  # seconds between two reads of the metrics file
LATE = 3  # exit status of a tracking process that ends itself because its time is over


class Tracker:
    """Handle of the tracking process for its owner."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Folder) -> None:
        self.process, self.folder = process, folder

    @classmethod
    def start(cls, cfg: Experiment, folder: Folder) -> Tracker | None:
        """Start tracking, or return None where it is switched off or cannot be started."""
        mode = read_requested_mode(cfg)
        if mode == "disabled":
            return None
        # observability is W&B's own telemetry: ten seconds at the end where the host does not answer
        environ = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"} | os.environ
        for name in ("WANDB_MODE", SERVICE):
            environ.pop(name, None)
        try:
            (folder.path / "wandb").mkdir(exist_ok=True)
            with open(folder.attempt / "logs" / "tracker.log", "wb") as log:
                process = subprocess.Popen(
                    build_command(folder, mode),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    start_new_session=True,  # Ctrl-C is not for it, and its group can be ended as one
                )
        except OSError as error:
            print(f"W&B: nothing is tracked: {error}", flush=True)
            return None
        return cls(process, folder)

    def kill(self) -> None:
        """End it and its helpers at once, where the run folder is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self, timeout: float) -> str:
        """Let it forward the rest, for at most `timeout` seconds; return one line that names the W&B run."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        log = self.folder.attempt / "logs" / "tracker.log"
        try:
            problem = describe_tracker_end(self.process.wait(timeout + 1), timeout)  # it ends itself after `timeout`
        except subprocess.TimeoutExpired:
            problem = describe_tracker_end(LATE, timeout)
        except KeyboardInterrupt:
            problem = "not complete: stopped by Ctrl-C"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        status = read_json(self.folder.path / "wandb" / "status.json")
        if not status:
            return f"W&B: nothing was tracked; see {log}"
        reason = f" ({status['reason']})" if status.get("reason") else ""
        rest = f"; {problem}, see {log}" if problem else ""
        if status["mode"] == "online":
            return f"W&B: {status['url']}{rest}"
        words = shlex.quote(shlex.quote(self.folder.reference))  # RUNS is split into words
        return f"W&B: offline{reason}; send it with: make sync RUNS={words}{rest}"


def describe_tracker_end(status: int, timeout: float) -> str:
    """Describe why a tracking process with this exit status has not forwarded everything; empty where it has."""
    if status == LATE:
        return f"not complete after {timeout:g} s"
    if status < 0:
        return f"not complete: the tracking process was killed by {signal.Signals(-status).name}"
    return f"not complete: the tracking process failed with exit status {status}" if status else ""


def build_command(folder: Folder, mode: str, reason: str = "") -> list[str]:
    """Return the command of the tracking process."""
    return [sys.executable, "-m", "common.runs.wandb_tracker", str(folder.path), str(folder.number), mode, reason]


def wait_for_owner_exit(folder: Folder, closed: threading.Event, seconds: float) -> None:
    """Set `closed` when stdin closes, however the owner ended, and end this process `seconds` later in any case."""
    sys.stdin.read()
    if not folder.result:  # the owner was killed: its ranks end a moment after it, and may still write
        time.sleep(POLL)
    closed.set()
    time.sleep(seconds)
    kill_children()
    os._exit(LATE)


def follow_rows(path: Path, closed: threading.Event) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a growing file, and None whenever there is no more for now, until `closed` and the last row."""
    position, rest = 0, ""
    while True:
        last = closed.wait(POLL)
        if path.exists():
            with open(path) as file:
                file.seek(position)
                rest += file.read()
                position = file.tell()
        *lines, rest = rest.split("\n")
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # cut off by a full disk
                continue
            yield row
        if last:
            return
        yield None


def main(path: str, attempt: str, mode: str, reason: str) -> None:
    """Forward the rows of an attempt to W&B until stdin closes, then its model and result."""
    for number in (signal.SIGTERM, signal.SIGUSR2):  # SLURM signals every process of a job; this one ends with stdin
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # training goes first
    adopt_orphans()  # W&B's helpers leave processes behind
    folder = Folder(Path(path), int(attempt))
    closed = threading.Event()
    threading.Thread(
        target=wait_for_owner_exit, args=(folder, closed, load_run_config(folder).wandb.finish_timeout), daemon=True
    ).start()
    run: Any = None
    forwarded = read_forwarded_rows(folder)
    media = MediaForwarder(folder)
    count = recorded = 0
    for row in follow_rows(folder.metrics_file, closed):
        if row is None:
            if run is not None:
                media.forward(run)
            if count > recorded:
                record_forwarded_count(folder, count)
                recorded = count
            continue
        if run is None:  # only now, so that the import does not compete with the first step
            run = connect_wandb(folder, mode, reason)
        if make_row_key(row) not in forwarded:  # else a step that was done again, to the bit
            run.log(row)
        count += 1
    if run is None:
        run = connect_wandb(folder, mode, reason)
    record_forwarded_count(folder, count)
    media.forward(run)
    result = folder.result
    log_model_artifact(run, folder)
    run.summary.update(parse_result(result).list_columns() | {"restarts": len(folder.attempts()) - 1})
    run.finish(exit_code=int(result.get("exit_status", 1)))
    shut_down_wandb()


def make_row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of a row but for its time: a step that is done again with other settings has others."""
    return tuple(sorted((name, value) for name, value in row.items() if name != "time"))


def record_forwarded_count(folder: Folder, rows: int) -> None:
    """Write the number of rows that W&B has of this attempt, for later ones."""
    with contextlib.suppress(UserError):  # a full disk: they then come twice
        write_json(folder.attempt / FORWARDED, {"rows": rows})


def read_forwarded_rows(folder: Folder) -> set[tuple[Any, ...]]:
    """Return the keys of the rows of earlier attempts that W&B has."""
    known: set[tuple[Any, ...]] = set()
    for attempt in folder.attempts():
        count = read_json(attempt.attempt / FORWARDED).get("rows")
        if attempt.number < folder.number and isinstance(count, int):
            known |= {make_row_key(row) for row in itertools.islice(attempt.read_own_rows(), count)}
    return known


def connect_wandb(folder: Folder, asked: str, reason: str) -> Any:
    """Start the W&B run; after a failing online start, start it offline in a fresh process."""
    mode, why = choose_mode(asked)
    reason = reason or why
    if not folder.attempt.exists():  # moved or deleted: W&B would create it anew
        sys.exit(1)
    try:
        run = init_wandb_run(folder, mode)
    except Exception as error:  # whatever W&B says, training is recorded offline
        if mode == "offline":
            raise
        kill_children()
        os.environ.pop(SERVICE, None)
        os.execv(sys.executable, build_command(folder, "offline", f"W&B refused the run: {summarize_error(error)}"))
    status = {"id": run.id, "mode": mode, "reason": reason, "url": run.url, "dir": str(Path(run.dir).parent)}
    write_json(folder.path / "wandb" / "status.json", status)
    return run


def shut_down_wandb() -> None:
    """Let W&B's helper end, and leave none of its own helpers behind."""
    import wandb

    wandb.teardown()
    kill_children()


if __name__ == "__main__":
    main(*sys.argv[1:])
