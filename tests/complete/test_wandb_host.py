"""`make sync`, `make dashboard` and `make leet` with W&B hosts that record requests or fail, and with W&B's viewer."""

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
from common.runs.tracking.wandb_process import TIMED_OUT
from common.runs.tracking.wandb_run import load_run_config
from tests.harness.commands import execution
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    Settings,
    find_processes,
    get_only_run,
    make_environment,
    run_experiment,
    wait_until,
)
from tests.harness.repository import ROOT
from tests.harness.runs import wandb_host
from tests.harness.runs.long_runs import start_long_run
from tests.harness.runs.synthetic_runs import SyntheticRun
from tests.harness.runs.tracked_runs import (
    API_KEY,
    LONG_RUN,
    extract_metrics,
    get_exit_code,
    kill_tracked_rank,
    list_expected_rows,
    prepare_tracking,
    read_offline_metrics,
    read_records,
    read_tracking_status,
    run_tracking,
    track_finished_run,
    write_failing_wandb,
)

KEY = "0123456789abcdef" * 2 + "01234567"


class Host:
    """The W&B host of a test, and its account."""

    def __init__(self, folder: Path) -> None:
        self.record = folder / "record"
        self.folder = folder
        arguments = [sys.executable, "-m", "tests.harness.runs.wandb_host", "127.0.0.1", str(self.record)]
        self.process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    @property
    def environment(self) -> dict[str, str]:
        account = {"HOME": str(self.folder), "WANDB_BASE_URL": self.url, "WANDB_API_KEY": API_KEY}
        return make_environment(WANDB_ERROR_REPORTING="false", WANDB_MODE="offline", **account)

    def sent(self, part: str) -> list[Any]:
        """Return the requests to addresses that contain `part`."""
        return wandb_host.read_requests(self.record, part)

    def history(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the rows of metrics that were sent, each with its position."""
        return wandb_host.read_received_metrics(self.record)

    def read_summary(self) -> dict[str, Any]:
        """Return the newest summary that was sent."""
        # The request that completes the run may contain no files, if W&B has sent the summary before.
        files = [request.get("files") or {} for request in self.sent("file_stream")]
        summaries = [sent["wandb-summary.json"] for sent in files if "wandb-summary.json" in sent]
        return dict(json.loads(summaries[-1]["content"][-1]))

    def sent_steps(self) -> list[int]:
        """Return the steps of all rows that were sent."""
        return [row["global_step"] for _, row in self.history()]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    started = Host(tmp_path)
    yield started
    started.process.terminate()
    started.process.wait()


def call(module: str, *arguments: str, env: dict[str, str], status: int = 0) -> Completed:
    return execution.execute_command([sys.executable, "-m", module, *arguments], env=env, timeout=120, status=status)


def tracked(folder: RunFolder, env: dict[str, str]) -> RunFolder:
    """Track every attempt of a run offline, as the run itself would have done."""
    for attempt in folder.list_attempts():
        completed = run_tracking(attempt, "offline", env)
        assert completed.returncode == 0, completed.stderr
    return folder


def test_every_attempt_is_sent_once_and_in_order(host: Host, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    idle = {"measured": {"idle_share": [0.1, 0.3]}}
    finished = SyntheticRun("mnist_pipeline", 0, 40, attempts=2, step_seconds=0.2, result=idle).write(runs)
    tracked(finished, host.environment)
    running = SyntheticRun("ddp_multinode", 1, 20, state="running").write(runs)
    tracked(running, host.environment)
    arguments = ("sync", f"--runs-folder={runs}")

    preview = call("slurm", *arguments, "--dry-run=1", env=host.environment)
    assert preview.stdout.count(f"{finished.path}/wandb/offline-run") == 2
    assert not host.record.exists()

    completed = call("slurm", *arguments, env=host.environment)
    assert "sent 2 of 2" in completed.stdout
    history = host.history()
    expected = list_expected_rows(finished)
    assert len(expected) > 40
    # the second attempt continues at the position where the first one ended
    assert [position for position, _ in history] == list(range(len(expected)))
    # W&B drops rows whose step decreases
    assert [row["_step"] for _, row in history] == list(range(len(history)))
    assert host.sent_steps() == [row["global_step"] for row in expected]
    upserts = [request for request in host.sent("graphql") if "UpsertBucket" in str(request.get("operationName"))]
    names = {request["variables"]["name"] for request in upserts}
    assert names == {json.loads((finished.path / "wandb" / "id.json").read_text())["id"]}
    summary = host.read_summary()
    assert summary["restarts"] == 1
    assert summary["waiting"] == 0.2
    assert summary["test_accuracy"] == 0.96

    repeated = call("slurm", *arguments, env=host.environment)
    assert "nothing to send" in repeated.stdout
    assert "has not ended yet" in repeated.stdout
    assert len(host.history()) == len(history)


def test_without_an_account_nothing_is_sent(host: Host, tmp_path: Path) -> None:
    env = host.environment
    tracked(SyntheticRun("mnist_pipeline", 0, 10).write(tmp_path / "runs"), env)
    del env["WANDB_API_KEY"]
    for arguments in (["slurm", "sync", f"--runs-folder={tmp_path}/runs"], ["slurm", "dashboard"]):
        completed = call(*arguments, env=env, status=2)
        assert "no W&B account is configured" in completed.stderr
        assert "wandb login" in completed.stderr
    assert not host.record.exists()


def list_panels(spec: dict[str, Any]) -> list[list[Any]]:
    """Return the configurations of the panels of each section."""
    sections = spec["section"]["panelBankConfig"]["sections"]
    panels = []
    for section in sections:
        panels.append([panel["config"] for panel in section["panels"]])
    return panels


def test_the_dashboard_is_saved(host: Host) -> None:
    completed = call("slurm", "dashboard", "--project=mine", env=host.environment)
    assert completed.stdout.startswith(f"workspace: {host.url}/e/mine?nw=")
    (saved,) = (request["variables"] for request in host.sent("graphql") if "upsertView" in request["query"])
    assert saved["entityName"] == "e"
    assert saved["projectName"] == "mine"
    assert saved["type"] == "project-view"
    saved_spec = json.loads(saved["spec"])
    preview = call("slurm", "dashboard", "--project=e/mine", "--dry-run=1", env=host.environment)
    preview_spec = json.loads(preview.stdout)["spec"]
    assert list_panels(preview_spec) == list_panels(saved_spec)  # test_upload.py checks the preview
    (runset,) = saved_spec["section"]["runSets"]
    assert [key["name"] for key in runset["grouping"]] == ["experiment.value", "world_size.value"]


def test_the_viewer_opens_on_the_runs(host: Host, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    tracked(SyntheticRun("mnist_pipeline", 0, 10).write(runs), host.environment)

    arguments = [sys.executable, "-m", "slurm", "leet", f"--runs-folder={runs}"]
    pid, screen = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(arguments[0], arguments, host.environment | {"TERM": "xterm-256color"})
    try:
        use_viewer(screen)
        exited = os.WEXITED | os.WNOHANG | os.WNOWAIT
        status = wait_until(lambda: os.waitid(os.P_PID, pid, exited), "the viewer exits")
        assert status.si_status == 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(screen)


def use_viewer(screen: int) -> None:
    """Wait until the viewer shows a run, and then quit the viewer. `screen` controls its terminal."""
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    output = b""
    deadline = time.monotonic() + 60
    while b"test_accuracy" not in output and time.monotonic() < deadline:
        if select.select([screen], [], [], 0.2)[0]:
            output += os.read(screen, 65_536)
    assert b"test_accuracy" in output, output[-2000:]
    assert b"-0000-mnist" in output, output[-2000:]
    os.write(screen, b"q")
    while time.monotonic() < deadline:
        if select.select([screen], [], [], 0.2)[0]:
            try:
                os.read(screen, 65_536)
            except OSError:  # the viewer has closed its terminal
                break


# ---- hosts that fail


class AccountOnlyHandler(BaseHTTPRequestHandler):
    """A W&B host that knows the account, and refuses other queries or does not respond to them.

    It refuses them if `server.refuses_queries`.
    """

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        viewer = {"id": "u", "entity": "e", "username": "u", "email": "e@e", "teams": {"edges": []}, "flags": "{}"}
        if b"query Viewer" in body:
            self.answer(200, {"data": {"viewer": viewer}})
        elif self.path == "/graphql" and self.server.refuses_queries:  # type: ignore[attr-defined]
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
def served(handler: type[BaseHTTPRequestHandler], *, refuses_queries: bool = False) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.refuses_queries = refuses_queries  # type: ignore[attr-defined]
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_run_that_the_host_refuses_is_tracked_offline(tmp_path: Path) -> None:
    source = SyntheticRun("mnist_pipeline", 0, 30).write(tmp_path / "runs")
    with served(AccountOnlyHandler, refuses_queries=True) as url:
        folder = track_finished_run(source, tmp_path / "tracked", url)
    assert read_tracking_status(folder)["mode"] == "offline"
    reason = read_tracking_status(folder)["reason"]
    assert "W&B could not start the run: " in reason
    assert "error 403" in reason, "the refusal must end the wait, and not a timeout"
    assert extract_metrics(read_records(folder)) == list_expected_rows(folder)


def test_the_wait_for_a_silent_host_ends_after_the_timeout(tmp_path: Path) -> None:
    source = SyntheticRun("mnist_pipeline", 0, 30).write(tmp_path / "runs")
    with served(AccountOnlyHandler) as url:
        folder, env = prepare_tracking(source, tmp_path / "tracked", url, finish_timeout=4)
        process = run_tracking(folder, "online", env)
    assert process.returncode == TIMED_OUT, "the timeout must end the wait, and not W&B"


class RefusingHandler(BaseHTTPRequestHandler):
    """A W&B host that refuses every account."""

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
    """W&B hosts on loopback: one refuses every key, one accepts connections and never responds, one is closed."""
    with served(RefusingHandler) as refusing_url, socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            closed_port = closed.getsockname()[1]
        silent_port = silent.getsockname()[1]
        yield {
            "REFUSING": refusing_url,
            "SILENT": f"http://127.0.0.1:{silent_port}",
            "CLOSED": f"http://127.0.0.1:{closed_port}",
        }


UNUSABLE_ACCOUNTS = [
    ("nonsense", "", "W&B: offline (could not log in to W&B:"),
    (KEY, "REFUSING", "error 401"),
    (KEY, "CLOSED", "refused"),
    (KEY, "SILENT", "does not respond"),
]


@pytest.mark.parametrize(
    "key, host_name, reason", UNUSABLE_ACCOUNTS, ids=["malformed key", "refused key", "closed port", "silent host"]
)
def test_a_run_trains_without_the_account(
    hosts: dict[str, str], tmp_path: Path, digits: Settings, key: str, host_name: str, reason: str
) -> None:
    env: dict[str, Any] = {"WANDB_MODE": "", "WANDB_API_KEY": key, "HOME": str(tmp_path / "home")}
    if host_name:
        env["WANDB_BASE_URL"] = hosts[host_name]
    settings = (*digits, "steps=5", "wandb.finish_timeout=200")
    completed = run_experiment("mnist_pipeline", *settings, runs=tmp_path / "runs", timeout=250, **env)
    output = completed.stdout + completed.stderr
    assert "Traceback" not in output, output
    assert "W&B: offline (" in output, output
    assert reason in output, output
    assert completed.folder.result["state"] == "finished"
    assert not find_processes(str(tmp_path))
    for path in completed.folder.path.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


# ---- killed processes and signals


def test_a_killed_first_stage_is_named_and_its_rows_are_kept(tmp_path: Path, digits: Settings) -> None:
    process, folder, pid = kill_tracked_rank(0, (*digits, *LONG_RUN), tmp_path)
    assert process.returncode == 128 + signal.SIGKILL
    assert f"error: rank 0 (pid {pid}) was killed by SIGKILL" in process.stdout + process.stderr
    assert folder.result["state"] == "failed"
    assert len(folder.read_metrics()) > 1
    tracked_records = read_records(folder)
    assert extract_metrics(tracked_records) == list_expected_rows(folder)
    assert get_exit_code(tracked_records) == process.returncode


def test_no_process_outlives_a_killed_launcher_and_sync_sends_its_rows(
    host: Host, tmp_path: Path, digits: Settings
) -> None:
    env: dict[str, Any] = {"WANDB_MODE": "offline", "HOME": str(tmp_path / "home")}
    runs = tmp_path / "runs"
    with start_long_run("mnist_pipeline", *digits, *LONG_RUN, runs=runs, **env) as process:
        folder = get_only_run(runs)
        wait_until(lambda: len(folder.read_metrics()) > 100, "the run trains")
        assert len(find_processes(str(runs))) >= 3  # launcher and two ranks
        process.kill()
        process.wait(WAIT_TIMEOUT)
        wait_until(lambda: not find_processes(str(runs)), "all processes have ended")
    assert not list(folder.path.glob("wandb/*run-*")), "W&B was started"
    preview = call("slurm", "sync", f"--runs={runs}", "--dry-run=1", env=host.environment)
    assert "rows that W&B lacks will be read from metrics.jsonl" in preview.stdout
    assert not host.record.exists()
    completed = call("slurm", "sync", f"--runs={runs}", env=host.environment)
    assert "sent 1 of 1" in completed.stdout, completed.stdout + completed.stderr
    assert host.sent_steps() == list_steps(list_expected_rows(folder))
    assert get_exit_code(read_records(folder)) == 1


def test_the_summary_of_a_finished_run_has_no_failure_of_an_earlier_attempt(host: Host, tmp_path: Path) -> None:
    run = SyntheticRun("mnist_pipeline", 0, 20, attempts=2, step_seconds=0.2)
    first, second = run.write(tmp_path / "runs").list_attempts()
    record = second.attempt_folder / "attempt.json"
    hidden_record = record.rename(tmp_path / "attempt.json")  # the second attempt starts after the first one
    result_file = first.path / "result.json"
    final_result = result_file.read_text()
    result = SyntheticRun(state="failed", result={"cause": "diverged"}).make_result(10, 64)
    result_file.write_text(json.dumps(result))
    env = host.environment
    assert run_tracking(first, "online", env).returncode == 0
    summary = host.read_summary()
    assert (summary["reason"], summary["last_step"]) == ("the loss is nan", 10)
    assert summary["cause"] == "diverged"

    hidden_record.rename(record)
    result_file.write_text(final_result)
    assert run_tracking(second, "online", env).returncode == 0
    summary = host.read_summary()
    assert (summary["state"], summary["restarts"]) == ("finished", 1)
    assert [summary.get(name) for name in ("reason", "last_step", "cause")] == [None, None, None]


def list_steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["global_step"] for row in rows]


class TrackedAttempt:
    """An attempt that is tracked online while its rows are written."""

    def __init__(self, folder: RunFolder, host: Host) -> None:
        self.folder = folder
        self.rows = folder.metrics_file.read_text().splitlines(keepends=True)
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
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
        assert len(pids) > 1, "W&B's client does not run"
        for pid in pids:
            os.kill(pid, number)

    def finish(self) -> None:
        """End the tracking as the launcher of a run does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(WAIT_TIMEOUT) == 0, (self.folder.attempt_folder / "logs" / "tracker.log").read_text()


def test_signals_to_wandb_lose_no_rows_of_an_online_run(host: Host, tmp_path: Path) -> None:
    """SIGTERM, as when a job is cancelled; then SIGKILL in the next attempt; then `make sync`."""
    folder = SyntheticRun("mnist_pipeline", 0, 60, attempts=2, step_seconds=0.2).write(tmp_path / "runs")
    first, second = folder.list_attempts()
    # the second attempt does not exist while the first one is tracked
    second_record = second.attempt_folder / "attempt.json"
    second_record_text = second_record.read_text()
    second_record.unlink()

    tracked_first = TrackedAttempt(first, host)
    tracked_first.write(10)
    wait_until(lambda: len(host.history()) == 10, "the first rows have been sent", 60)
    tracked_first.write(5)
    time.sleep(0.7)  # W&B's client has received the rows, but not sent them yet
    tracked_first.signal(signal.SIGTERM)
    tracked_first.write(5)
    time.sleep(1)
    tracked_first.write(1000)
    tracked_first.finish()
    assert "restarting the W&B client" in (first.attempt_folder / "logs" / "tracker.log").read_text()
    first_steps = list_steps(list(first.read_attempt_rows()))
    assert host.sent_steps() == first_steps

    second_record.write_text(second_record_text)
    tracked_second = TrackedAttempt(second, host)
    tracked_second.write(10)
    count = len(host.history())
    wait_until(lambda: len(host.history()) > count, "some rows of the second attempt have been sent", 60)
    tracked_second.write(5)
    time.sleep(0.7)
    tracked_second.signal(signal.SIGKILL)
    tracked_second.process.wait()
    tracked_second.write(1000)
    expected = list_steps(list_expected_rows(folder))
    assert host.sent_steps() != expected
    call("slurm", "sync", f"--runs={tmp_path / 'runs'}", env=host.environment)
    # steps of the first attempt that the second one replaced had been sent before
    replaced = [step for step in first_steps if step not in expected]
    assert sorted(host.sent_steps()) == sorted(expected + replaced)
    positions = [position for position, _ in host.history()]
    assert positions == list(range(len(positions)))
    assert not list(folder.path.glob("wandb/offline-run-*"))
    assert not read_offline_metrics(folder)


def test_a_failing_tracker_does_not_fail_the_run(tmp_path: Path, digits: Settings) -> None:
    paths = write_failing_wandb(tmp_path)
    completed = run_experiment(
        "mnist_pipeline", *digits, runs=tmp_path / "runs", WANDB_MODE="offline", PYTHONPATH=paths
    )
    assert completed.folder.result["state"] == "finished"
    assert "tracking is incomplete: the tracking process failed with exit status 1, see" in completed.stdout
    assert "No space left" in (completed.folder.path / "attempts/0001/logs/tracker.log").read_text()
