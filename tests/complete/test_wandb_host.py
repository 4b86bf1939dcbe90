"""A W&B host that keeps what it is sent, hosts that fail, and W&B's viewer: make sync, dashboard and leet for real."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import RunFolder
from common.runs.tracking.wandb_run import load_run_config
from tests.harness import wandb_host, warm
from tests.harness.long_runs import only_folder, train_long
from tests.harness.made_runs import Made
from tests.harness.processes import environment, processes_of, run, wait_until
from tests.harness.tracked_runs import (
    SECRET,
    chosen_rows,
    exit_code,
    history,
    kill_rank,
    offline_history,
    records,
    run_tracking,
    status,
    track,
)
from tests.harness.warm import ROOT

BOUND = 30.0  # seconds; the waits under test take up to 4, without their bounds 20 and more
LONG = ("epochs=1000", "steps=0", "log.seconds=0.1", "wandb.finish_timeout=200")
KEY = "0123456789abcdef" * 2 + "01234567"


class Host:
    """The W&B host of a test, with its account."""

    def __init__(self, folder: Path) -> None:
        self.record = folder / "record"
        self.folder = folder
        arguments = [sys.executable, "-m", "tests.harness.wandb_host", "127.0.0.1", str(self.record)]
        self.process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    @property
    def environment(self) -> dict[str, str]:
        own = {"HOME": str(self.folder), "WANDB_BASE_URL": self.url, "WANDB_API_KEY": SECRET}
        return environment(WANDB_ERROR_REPORTING="false", **own) | {"WANDB_MODE": "offline"}  # it is about runs

    def sent(self, part: str) -> list[Any]:
        """What was sent to addresses that hold `part`."""
        return wandb_host.read_sent(self.record, part)

    def history(self) -> list[tuple[int, dict[str, Any]]]:
        """The rows of metrics that were sent, each with the place that it was sent for."""
        return wandb_host.read_history(self.record)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.process.terminate()
    found.process.wait()


def call(module: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return warm.execute([sys.executable, "-m", module, *arguments], env=env, timeout=120)


def tracked(folder: RunFolder, env: dict[str, str]) -> RunFolder:
    """Track every start of a run offline, as the run itself would have."""
    for attempt in folder.list_attempts():
        completed = run_tracking(attempt, "offline", env)
        assert completed.returncode == 0, completed.stderr
    return folder


def test_every_start_is_sent_once_and_in_order(host: Host, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    idle = {"measured": {"idle_share": [0.1, 0.3]}}
    twice = tracked(
        Made("mnist_pipeline", 0, 40, attempts=2, step_seconds=0.2, result=idle).write(runs), host.environment
    )
    tracked(Made("ddp_multinode", 1, 20, state="running").write(runs), host.environment)
    only_this = f"{twice.path}/wandb/offline-run"
    arguments = ("sync", f"--runs-folder={runs}")

    shown = call("slurm", *arguments, "--dry-run=1", env=host.environment)
    assert shown.stdout.count(only_this) == 2
    assert not host.record.exists()

    completed = call("slurm", *arguments, env=host.environment)
    assert completed.returncode == 0, completed.stderr
    assert "sent 2 of 2" in completed.stdout
    history = host.history()
    expected = chosen_rows(twice)
    assert len(expected) > 40
    # the second goes on where the first ended
    assert [place for place, _ in history] == list(range(len(expected)))
    assert [row["_step"] for _, row in history] == list(range(len(history)))  # steps that go back would be dropped
    assert [row["global_step"] for _, row in history] == [row["global_step"] for row in expected]
    names = {s["variables"]["name"] for s in host.sent("graphql") if "UpsertBucket" in str(s.get("operationName"))}
    assert names == {json.loads((twice.path / "wandb" / "id.json").read_text())["id"]}
    *_, last = [sent["files"] for sent in host.sent("file_stream") if "complete" in sent]
    summary = json.loads(last["wandb-summary.json"]["content"][-1])
    assert (summary["restarts"], summary["waiting"], summary["test_accuracy"]) == (1, 0.2, 0.96)

    again = call("slurm", *arguments, env=host.environment)
    assert again.returncode == 0
    assert "nothing to send" in again.stdout
    assert "has not ended yet" in again.stdout
    assert len(host.history()) == len(history)


def test_without_an_account_nothing_is_sent(host: Host, tmp_path: Path) -> None:
    env = host.environment
    tracked(Made("mnist_pipeline", 0, 10).write(tmp_path / "runs"), env)
    for arguments in (["slurm", "sync", f"--runs-folder={tmp_path}/runs"], ["slurm", "dashboard"]):
        completed = call(*arguments, env={k: v for k, v in env.items() if k != "WANDB_API_KEY"})
        assert completed.returncode == 2
        assert "no W&B account is configured" in completed.stderr
        assert "wandb login" in completed.stderr
    assert not host.record.exists()


def test_the_dashboard_is_saved(host: Host) -> None:
    completed = call("slurm", "dashboard", "--project=mine", env=host.environment)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith(f"workspace: {host.url}/e/mine?nw=")
    (saved,) = (s["variables"] for s in host.sent("graphql") if "upsertView" in s["query"])
    assert (saved["entityName"], saved["projectName"], saved["type"]) == ("e", "mine", "project-view")
    shown = call("slurm", "dashboard", "--project=e/mine", "--dry-run=1", env=host.environment)
    sections, sent = (
        [[panel["config"] for panel in section["panels"]] for section in spec["section"]["panelBankConfig"]["sections"]]
        for spec in (json.loads(shown.stdout)["spec"], json.loads(saved["spec"]))
    )
    assert sections == sent  # what test_upload.py looks at
    (runset,) = json.loads(saved["spec"])["section"]["runSets"]
    assert [key["name"] for key in runset["grouping"]] == ["experiment.value", "world_size.value"]


def test_the_viewer_opens_on_the_runs(host: Host, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    tracked(Made("mnist_pipeline", 0, 10).write(runs), host.environment)

    arguments = [sys.executable, "-m", "slurm", "leet", f"--runs-folder={runs}"]
    pid, screen = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(arguments[0], arguments, host.environment | {"TERM": "xterm-256color"})
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    seen = b""
    deadline = time.monotonic() + 60
    while b"test_accuracy" not in seen and time.monotonic() < deadline:
        if select.select([screen], [], [], 0.2)[0]:
            seen += os.read(screen, 65_536)
    assert b"test_accuracy" in seen, seen[-2000:]
    assert b"-0000-mnist" in seen, seen[-2000:]
    os.write(screen, b"q")
    while time.monotonic() < deadline:
        if select.select([screen], [], [], 0.2)[0]:
            try:
                os.read(screen, 65_536)
            except OSError:  # it has closed its terminal
                break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# ---- hosts that fail


class Late(BaseHTTPRequestHandler):
    """A W&B host that knows the account; `server.late` is what it does with everything else."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        viewer = {"id": "u", "entity": "e", "username": "u", "email": "e@e", "teams": {"edges": []}, "flags": "{}"}
        if b"query Viewer" in body:
            self.answer(200, {"data": {"viewer": viewer}})
        elif self.path == "/graphql" and self.server.late == "refuse":  # type: ignore[attr-defined]
            self.answer(403, {})
        else:
            time.sleep(600)

    def do_GET(self) -> None:
        self.answer(200, {})

    def answer(self, code: int, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler], late: str = "") -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.late = late  # type: ignore[attr-defined]
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_host_that_refuses_the_run_leaves_an_offline_one(tmp_path: Path) -> None:
    source = Made("mnist_pipeline", 0, 30).write(tmp_path / "runs")
    with served(Late, "refuse") as url:
        folder, seconds = track(source, tmp_path / "tracked", url)
    assert seconds < BOUND
    assert status(folder)["mode"] == "offline"
    assert "W&B could not start the run: " in status(folder)["reason"]
    assert history(records(folder)) == chosen_rows(folder)


def test_host_that_falls_silent_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    source = Made("mnist_pipeline", 0, 30).write(tmp_path / "runs")
    with served(Late, "silent") as url:
        _, seconds = track(source, tmp_path / "tracked", url, finish_timeout=4)
    assert seconds < BOUND


class Refusing(BaseHTTPRequestHandler):
    """A W&B host that knows nobody."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """W&B hosts on loopback: one refuses every key, one takes connections and says nothing, one is not there."""
    with served(Refusing) as refusing, socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed = gone.getsockname()[1]
        yield {
            "REFUSING": refusing,
            "SILENT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "CLOSED": f"http://127.0.0.1:{closed}",
        }


@pytest.mark.parametrize(
    ("key", "where", "parts"),
    [
        ("nonsense", "", ("W&B: offline (could not log in to W&B:",)),
        (KEY, "REFUSING", ("W&B: offline (", "error 401")),
        (KEY, "CLOSED", ("W&B: offline (", "refused")),
        (KEY, "SILENT", ("W&B: offline (", "does not respond")),
    ],
    ids=["malformed key", "refused key", "nobody there", "silent host"],
)
def test_a_run_goes_on_without_the_account(
    hosts: dict[str, str], tmp_path: Path, digits: tuple[str, ...], key: str, where: str, parts: tuple[str, ...]
) -> None:
    env: dict[str, Any] = {"WANDB_MODE": "", "WANDB_API_KEY": key, "HOME": str(tmp_path / "home")}
    env |= {"WANDB_BASE_URL": hosts[where]} if where else {}
    completed = run(
        "mnist_pipeline", *digits, "steps=5", "wandb.finish_timeout=200", runs=tmp_path / "runs", timeout=250, **env
    )
    said = completed.out + completed.err
    assert completed.status == 0, said
    assert "Traceback" not in said, said
    assert all(part in said for part in parts), said
    assert completed.folder.result["state"] == "finished"
    assert not processes_of(str(tmp_path))
    written = [path for path in completed.folder.path.rglob("*") if path.is_file()]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


# ---- violence


def test_a_killed_first_stage_is_named_and_what_came_before_is_kept(tmp_path: Path, digits: tuple[str, ...]) -> None:
    process, folder, pid = kill_rank(0, (*digits, *LONG), tmp_path, BOUND)
    assert process.returncode == 128 + signal.SIGKILL
    assert f"error: rank 0 (pid {pid}) was killed by SIGKILL" in process.out + process.err
    assert folder.result["state"] == "failed"
    assert len(folder.read_metrics()) > 1
    found = records(folder)
    assert history(found) == chosen_rows(folder)
    assert exit_code(found) == process.returncode


def test_nothing_outlives_a_killed_launcher_and_sync_passes_its_rows_on(
    host: Host, tmp_path: Path, digits: tuple[str, ...]
) -> None:
    env: dict[str, Any] = {"WANDB_MODE": "offline", "HOME": str(tmp_path / "home")}
    runs = tmp_path / "runs"
    with train_long("mnist_pipeline", *digits, *LONG, runs=runs, **env) as process:
        folder = only_folder(runs)
        wait_until(lambda: len(folder.read_metrics()) > 100, "it trains")
        assert len(processes_of(str(runs))) >= 3  # launcher and two ranks
        process.kill()
        wait_until(lambda: process.poll() is not None and not processes_of(str(runs)), "all has ended", BOUND)
    assert not list(folder.path.glob("wandb/*run-*")), "nothing of W&B has run"
    shown = call("slurm", "sync", f"--runs={runs}", "--dry-run=1", env=host.environment)
    assert "rows that W&B lacks will be read from metrics.jsonl" in shown.stdout
    assert not host.record.exists()
    completed = call("slurm", "sync", f"--runs={runs}", env=host.environment)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "sent 1 of 1" in completed.stdout, completed.stdout + completed.stderr
    assert steps_of(host) == [row["global_step"] for row in chosen_rows(folder)]
    assert exit_code(records(folder)) == 1


def steps_of(host: Host) -> list[int]:
    """The steps of all rows that the host was sent."""
    return [row["global_step"] for _, row in host.history()]


class Live:
    """An attempt that is tracked online while its rows are written."""

    def __init__(self, folder: RunFolder, host: Host, rows: list[str]) -> None:
        self.folder = folder
        self.rows = rows
        folder.metrics_file.write_text("")
        (folder.attempt_folder / "logs").mkdir(exist_ok=True)
        env = host.environment | {"WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1"}
        del env["WANDB_MODE"]
        seconds = str(load_run_config(folder).wandb.finish_timeout)
        argv = [sys.executable, "-m", "common.runs.tracking.wandb_process", str(folder.path), str(folder.number)]
        argv += ["online", seconds]
        log = open(folder.attempt_folder / "logs" / "tracker.log", "ab")  # noqa: SIM115 (it ends with the test)
        self.process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )

    def write(self, count: int) -> None:
        """Write the next rows."""
        with open(self.folder.metrics_file, "a") as file:
            file.write("".join(self.rows[:count]))
        del self.rows[:count]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all its descendants, as SLURM does."""
        pids = [self.process.pid]
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, task.read_text().split())
        assert len(pids) > 1, "W&B's client runs"
        for pid in pids:
            os.kill(pid, number)

    def finish(self) -> None:
        """End as the owner of a run does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0, (self.folder.attempt_folder / "logs" / "tracker.log").read_text()


def test_signals_to_wandb_lose_no_rows_of_an_online_run(host: Host, tmp_path: Path) -> None:
    """SIGTERM, as when a job is cancelled; then SIGKILL in the next attempt; then make sync."""
    folder = Made("mnist_pipeline", 0, 60, attempts=2, step_seconds=0.2).write(tmp_path / "runs")
    first, second = folder.list_attempts()
    rows = [attempt.metrics_file.read_text().splitlines(keepends=True) for attempt in (first, second)]
    note = second.attempt_folder / "attempt.json"
    begun = note.read_text()
    note.unlink()

    live = Live(first, host, rows[0])
    live.write(10)
    wait_until(lambda: len(host.history()) == 10, "the first rows have come", 60)
    live.write(5)
    time.sleep(0.7)  # W&B's client gets them, and does not send them yet
    live.signal(signal.SIGTERM)
    live.write(5)
    time.sleep(1)
    live.write(1000)
    live.finish()
    assert "restarting the W&B client" in (first.attempt_folder / "logs" / "tracker.log").read_text()
    assert steps_of(host) == [row["global_step"] for row in first.read_attempt_rows()]

    note.write_text(begun)
    live = Live(second, host, rows[1])
    live.write(10)
    count = len(host.history())
    wait_until(lambda: len(host.history()) > count, "some of its rows have come", 60)
    live.write(5)
    time.sleep(0.7)
    live.signal(signal.SIGKILL)
    live.process.wait()
    live.write(1000)
    assert steps_of(host) != [row["global_step"] for row in chosen_rows(folder)]
    completed = call("slurm", "sync", f"--runs={tmp_path / 'runs'}", env=host.environment)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    known = [row["global_step"] for row in first.read_attempt_rows()]
    expected = [row["global_step"] for row in chosen_rows(folder)]
    assert sorted(steps_of(host)) == sorted([*expected, *(s for s in known if s not in expected)])
    assert [place for place, _ in host.history()] == list(range(len(host.history())))
    assert not list(folder.path.glob("wandb/offline-run-*"))
    assert not offline_history(folder)


def test_tracker_that_breaks_does_not_fail_the_run(tmp_path: Path, digits: tuple[str, ...]) -> None:
    fake = tmp_path / "fake" / "wandb" / "__init__.py"
    fake.parent.mkdir(parents=True)
    fake.write_text("raise OSError(28, 'No space left on device')\n")
    paths = os.pathsep.join([str(tmp_path / "fake"), os.environ.get("PYTHONPATH", "")])
    completed = run("mnist_pipeline", *digits, runs=tmp_path / "runs", WANDB_MODE="offline", PYTHONPATH=paths)
    assert completed.status == 0, completed.err
    assert completed.folder.result["state"] == "finished"
    assert "tracking is incomplete: the tracking process failed with exit status 1, see" in completed.out
    assert "No space left" in (completed.folder.path / "attempts/0001/logs/tracker.log").read_text()
