"""make sync, dashboard and leet: W&B's own client and viewer, and a host that keeps what it is sent."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.folder import Folder
from tests.harness.made_runs import Made
from tests.harness.processes import ROOT, environment

KEY = "5ec" + "0" * 36 + "7"  # as long as a key of W&B


class Host:
    """The W&B host of a test, with its account."""

    def __init__(self, room: Path) -> None:
        self.record, self.room = room / "record", room
        words = [sys.executable, "-m", "tests.harness.wandb_host", "127.0.0.1", str(self.record)]
        self.process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    @property
    def environment(self) -> dict[str, str]:
        own = {"HOME": str(self.room), "WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}
        return environment(WANDB_ERROR_REPORTING="false", **own) | {"WANDB_MODE": "offline"}  # it is about runs

    def sent(self, part: str) -> list[Any]:
        """What was sent to addresses that hold `part`."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [one["sent"] for one in map(json.loads, lines) if part in one["path"]]

    def history(self) -> list[tuple[int, dict[str, Any]]]:
        """The rows of metrics that were sent, each with the place that it was sent for."""
        files = [sent.get("files") or {} for sent in self.sent("file_stream")]
        parts = [each["wandb-history.jsonl"] for each in files if "wandb-history.jsonl" in each]
        return [(p["offset"] + i, json.loads(row)) for p in parts for i, row in enumerate(p["content"])]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.process.terminate()
    found.process.wait()


def call(module: str, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def tracked(folder: Folder, env: dict[str, str]) -> Folder:
    """Track every start of a run offline, as the run itself would have."""
    (folder.path / "wandb").mkdir()
    for attempt in folder.attempts():
        done = call("common.tracking", str(folder.path), str(attempt.number), "offline", "", env=env)
        assert done.returncode == 0, done.stderr
    return folder


def test_every_start_is_sent_once_and_in_order(host: Host, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    idle = {"idle_share": [0.1, 0.3]}
    twice = tracked(Made("mnist_pipeline", 0, 40, attempts=2, result=idle).write(runs), host.environment)
    tracked(Made("ddp_multinode", 1, 20, state="running").write(runs), host.environment)
    only_this = f"{twice.path}/wandb/offline-run"
    words = ("sync", f"--runs={runs}")

    shown = call("slurm.upload", *words, "--dry-run=1", env=host.environment)
    assert shown.stdout.count(only_this) == 2
    assert not host.record.exists()

    done = call("slurm.upload", *words, env=host.environment)
    assert done.returncode == 0, done.stderr
    assert "sent 2 of 2" in done.stdout
    history = host.history()
    first, second = (attempt.own_metrics() for attempt in twice.attempts())
    # the second goes on where the first ended
    assert [place for place, _ in history] == list(range(len(first) + len(second)))
    assert [row["_step"] for _, row in history] == list(range(len(history)))  # steps that go back would be dropped
    assert [row["global_step"] for _, row in history] == [row["global_step"] for row in (*first, *second)]
    names = {s["variables"]["name"] for s in host.sent("graphql") if "UpsertBucket" in str(s.get("operationName"))}
    assert names == {json.loads((twice.path / "wandb" / "id.json").read_text())["id"]}
    *_, last = [sent["files"] for sent in host.sent("file_stream") if "complete" in sent]
    summary = json.loads(last["wandb-summary.json"]["content"][-1])
    assert (summary["restarts"], summary["waiting"], summary["test_accuracy"]) == (1, 0.2, 0.96)

    again = call("slurm.upload", *words, env=host.environment)
    assert again.returncode == 0
    assert "nothing to send" in again.stdout and "is not over yet" in again.stdout
    assert len(host.history()) == len(history)


def test_without_an_account_nothing_is_sent(host: Host, tmp_path: Path) -> None:
    env = host.environment
    tracked(Made("mnist_pipeline", 0, 10).write(tmp_path / "runs"), env)
    for words in (["slurm.upload", "sync", f"--runs={tmp_path}/runs"], ["slurm.dashboard"]):
        done = call(*words, env={k: v for k, v in env.items() if k != "WANDB_API_KEY"})
        assert done.returncode == 2
        assert "no W&B account is configured" in done.stderr and "wandb login" in done.stderr
    assert not host.record.exists()


def panels(view: dict[str, Any]) -> dict[str, Any]:
    sections = view["section"]["panelBankConfig"]["sections"]
    return {panel["config"].get("chartTitle"): panel["config"] for section in sections for panel in section["panels"]}


def test_the_dashboard_is_shown_and_saved(host: Host) -> None:
    shown = call("slurm.dashboard", "--project=team/mine", "--dry-run=1", env=host.environment)
    assert shown.returncode == 0, shown.stderr
    view = json.loads(shown.stdout)
    assert (view["entity"], view["project"]) == ("team", "mine")
    assert not host.record.exists()

    done = call("slurm.dashboard", "--project=mine", env=host.environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"workspace: {host.url}/e/mine?nw=")
    (saved,) = (s["variables"] for s in host.sent("graphql") if "upsertView" in s["query"])
    assert (saved["entityName"], saved["projectName"], saved["type"]) == ("e", "mine", "project-view")
    spec = json.loads(saved["spec"])
    for drawn in (panels(spec), panels(view["spec"])):
        assert drawn["training loss by samples"]["xAxis"] == "samples"
        assert drawn["test accuracy by samples"]["metrics"] == ["test_accuracy"]
        assert (
            drawn["scaling efficiency by processes"]
            | {"xAxis": "config:world_size.value", "yAxis": "summary:efficiency"}
            == (drawn["scaling efficiency by processes"])
        )
        assert {"samples a second", "share of the time waited for other processes", "restarts"} <= drawn.keys()
    (runset,) = spec["section"]["runSets"]
    assert [key["name"] for key in runset["grouping"]] == ["experiment.value", "world_size.value"]


@pytest.mark.parametrize("project", ["a/b/c", "x#y", "x" * 200, "a\nb"])
def test_a_wrong_project_is_refused(project: str) -> None:
    done = call("slurm.dashboard", f"--project={project}", "--dry-run=1", env=environment())
    assert done.returncode == 2 and "PROJECT=" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_viewer_opens_on_the_runs(host: Host, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    untracked = Made("mnist_pipeline", 0, 10).write(runs)
    refused = call("slurm.upload", "leet", f"--runs={runs}", env=host.environment)
    assert refused.returncode == 2 and "make compare" in refused.stderr
    tracked(untracked, host.environment)

    words = [sys.executable, "-m", "slurm.upload", "leet", f"--runs={runs}"]
    pid, screen = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(words[0], words, host.environment | {"TERM": "xterm-256color"})
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    seen, deadline = b"", time.monotonic() + 60
    while b"test_accuracy" not in seen and time.monotonic() < deadline:
        if select.select([screen], [], [], 0.2)[0]:
            seen += os.read(screen, 65_536)
    assert b"test_accuracy" in seen, seen[-2000:]
    os.write(screen, b"q")
    while time.monotonic() < deadline:
        if select.select([screen], [], [], 0.2)[0]:
            try:
                os.read(screen, 65_536)
            except OSError:  # it has closed its terminal
                break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
