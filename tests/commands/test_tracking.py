"""Weights & Biases for real: what an offline run holds, and that W&B can neither stop, slow nor outlive a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.folder import Folder, read_json
from common.tracking import Tracker
from configs.mnist_pipeline import Config
from tests.harness.processes import ROOT, Done, command, environment, processes_of, run

SECRET = "5ec" + "0" * 36 + "7"  # as long as a key of W&B
LONG = ("epochs=1000", "steps=0", "log.seconds=0.1")
BOUND = 30.0  # seconds; the waits under test take up to 4, without their bounds 20 and more


def inspect(folder: Folder, *options: str) -> str:
    """What W&B wrote about a run, read back with its own tool."""
    words = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", *options, status(folder)["dir"]]
    env = environment(HOME=str(folder.path.parent))
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def records(folder: Folder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in inspect(folder).splitlines()]


def of_type(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row[kind] for row in rows if row["type"] == kind]


def status(folder: Folder) -> dict[str, Any]:
    return read_json(folder.path / "wandb" / "status.json")


def history(folder: Folder) -> list[dict[str, Any]]:
    """The rows of W&B without its own columns."""
    items = [record["item"] for record in of_type(records(folder), "history")]
    return [{name: value for name, value in item.items() if not name.startswith("_")} for item in items]


def exit_code(folder: Folder) -> int:
    (record,) = of_type(records(folder), "exit")
    return record.get("exit_code", 0)


def until(condition: Any, seconds: float = 60.0) -> float:
    """Wait until it holds; returns how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - start


def arguments() -> bytes:
    """The argument lists of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return b"\n".join(found)


# ---- an offline run


@dataclasses.dataclass
class Offline:
    done: Done
    seen: bytes
    """Argument lists of all processes while it ran."""


@pytest.fixture(scope="module")
def offline(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Offline:
    """A short run with a key in its environment."""
    place = tmp_path_factory.mktemp("offline")
    words = ["data.name=digits", f"data.cache={cache}", "data.test_limit=1000", "epochs=1", "steps=30"]
    full = command("mnist_pipeline", *words, "wandb.tags=[mine]", runs=place / "my runs")
    env = environment(WANDB_MODE="offline", WANDB_API_KEY=SECRET, HOME=str(place / "home"))
    with open(place / "out", "w+") as out:
        process = subprocess.Popen(full, cwd=ROOT, env=env, stdout=out, stderr=out)
        seen = b""
        while process.poll() is None:
            seen += arguments()
            time.sleep(0.02)
        out.seek(0)
        return Offline(Done(process.returncode, out.read(), "", place / "my runs"), seen)


def test_offline_run_says_how_to_upload(offline: Offline) -> None:
    assert offline.done.status == 0, offline.done.out
    place = status(offline.done.folder)
    assert place["mode"] == "offline"
    assert f"W&B: offline; upload with: wandb sync {shlex.quote(place['dir'])}" in offline.done.out
    assert Path(place["dir"]).is_relative_to(offline.done.folder.path / "wandb")


def test_every_row_of_metrics_is_in_the_history(offline: Offline) -> None:
    rows = offline.done.folder.metrics()
    assert len(rows) > 30
    assert history(offline.done.folder) == rows


def test_steps_are_the_axis_of_every_metric(offline: Offline) -> None:
    metrics = of_type(records(offline.done.folder), "metric")
    assert {"name": "global_step"}.items() <= metrics[0].items()
    assert [m["step_metric"] for m in metrics if m.get("glob_name") == "*"] == ["global_step"]


def test_summary_tags_and_config_are_complete(offline: Offline) -> None:
    folder = offline.done.folder
    shown = json.loads(inspect(folder, "--summary"))
    assert shown["state"] == "finished"
    assert shown["exit_code"] == 0
    assert shown["name"] == folder.path.name
    assert shown["run_id"] == status(folder)["id"]
    assert shown["project"] == "distributed-experiments"
    assert set(shown["tags"]) == {"mnist_pipeline", "data:digits", "world_size:2", "mine"}
    result = {name: value for name, value in folder.result.items() if isinstance(value, int | float | str)}
    assert result.items() <= shown["summary"].items()
    settings = yaml.safe_load((folder.path / "config.yaml").read_text())
    config = shown["config"]
    assert settings.items() <= config.items()
    assert (config["experiment"], config["world_size"], config["data"]["name"]) == ("mnist_pipeline", 2, "digits")
    meta = read_json(folder.path / "meta.json")
    assert config["meta"]["git"] == meta["git"]["sha"]
    assert config["meta"]["packages"] == meta["packages"]


def test_key_is_written_nowhere(offline: Offline) -> None:
    root = offline.done.runs.parent
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 20
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert str(offline.done.folder.path).encode() in offline.seen  # the tracker was seen
    assert SECRET.encode() not in offline.seen


# ---- switched off


@pytest.mark.parametrize(("mode", "environ"), [("wandb.mode=disabled", ""), ("wandb.mode=offline", "disabled")])
def test_disabled_leaves_no_trace(tmp_path: Path, digits: tuple[str, ...], mode: str, environ: str) -> None:
    one = ("stages=1", "microbatches=1", "steps=3")
    done = run("mnist_pipeline", *digits, *one, mode, runs=tmp_path, WANDB_MODE=environ, HOME=str(tmp_path.parent))
    assert done.status == 0, done.err
    assert not (done.folder.path / "wandb").exists()
    assert not (done.folder.path / "attempts/0001/logs/tracker.log").exists()
    assert "W&B" not in done.out


# ---- violence


@contextlib.contextmanager
def long_run(place: Path, digits: tuple[str, ...]) -> Iterator[tuple[subprocess.Popen[str], Folder]]:
    """A run that trains and is tracked, and would go on for minutes."""
    runs = place / "runs"
    env = environment(WANDB_MODE="offline", HOME=str(place))
    words = command("mnist_pipeline", *digits, *LONG, runs=runs)
    process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: list(runs.glob("*/wandb/status.json")))
        (path,) = runs.iterdir()
        yield process, Folder(path, 1)
    finally:
        process.kill()
        process.wait()


def ranks(launcher: int) -> list[int]:
    """The pids of a run's processes, in the order of their ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(int(pid) for pid in children if b"common.tracking" not in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_stage_is_named_and_what_came_before_is_kept(tmp_path: Path, digits: tuple[str, ...], rank: int) -> None:
    with long_run(tmp_path, digits) as (process, folder):
        pid = ranks(process.pid)[rank]
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: process.poll() is not None and not processes_of(str(tmp_path))) < 5
        assert process.stdout is not None
        said = process.stdout.read()
    assert process.returncode == 128 + signal.SIGKILL
    assert f"error: rank {rank} (pid {pid}) was killed by SIGKILL" in said
    assert "Traceback" not in said
    assert f"wandb sync {status(folder)['dir']}" in said
    assert folder.result["state"] == "failed"
    assert len(folder.metrics()) > 1
    assert history(folder) == folder.metrics()
    assert exit_code(folder) == process.returncode


def test_nothing_outlives_a_killed_launcher(tmp_path: Path, digits: tuple[str, ...]) -> None:
    with long_run(tmp_path, digits) as (process, folder):
        assert len(processes_of(str(tmp_path))) >= 4  # launcher, two ranks, tracker
        process.kill()
        assert until(lambda: process.poll() is not None and not processes_of(str(tmp_path))) < 5
    assert len(folder.metrics()) > 1
    assert history(folder) == folder.metrics()
    assert exit_code(folder) == 1


def test_tracker_that_breaks_does_not_fail_the_run(tmp_path: Path, digits: tuple[str, ...]) -> None:
    fake = tmp_path / "fake" / "wandb" / "__init__.py"
    fake.parent.mkdir(parents=True)
    fake.write_text("raise OSError(28, 'No space left on device')\n")
    paths = os.pathsep.join([str(tmp_path / "fake"), os.environ.get("PYTHONPATH", "")])
    done = run("mnist_pipeline", *digits, runs=tmp_path / "runs", WANDB_MODE="offline", PYTHONPATH=paths)
    assert done.status == 0, done.err
    assert done.folder.result["state"] == "finished"
    assert "W&B: nothing was tracked; see" in done.out
    assert "No space left" in (done.folder.path / "attempts/0001/logs/tracker.log").read_text()


def test_tracker_without_room_does_not_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wandb").touch()
    assert Tracker.start(Config(), Folder(tmp_path, 1)) is None
    assert "W&B: nothing is tracked" in capsys.readouterr().out


# ---- hosts that fail late


class Host(BaseHTTPRequestHandler):
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
def host(late: str) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.late = late  # type: ignore[attr-defined]
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def track(source: Folder, place: Path, url: str = "", **changes: Any) -> tuple[Folder, float]:
    """Track a finished run anew, with its owner gone already; returns its folder and the seconds it took."""
    folder = Folder(place / source.path.name, 1)
    if not folder.path.exists():
        shutil.copytree(source.path, folder.path, ignore=shutil.ignore_patterns("wandb", "code"))
        (folder.path / "wandb").mkdir()
    settings = yaml.safe_load((folder.path / "config.yaml").read_text())
    settings["wandb"] |= changes
    (folder.path / "config.yaml").write_text(yaml.safe_dump(settings))
    online = {"WANDB_BASE_URL": url, "WANDB_API_KEY": SECRET} if url else {}
    env = environment(HOME=str(place), WANDB_ERROR_REPORTING="false", **online)
    del env["WANDB_MODE"]
    words = [sys.executable, "-m", "common.tracking", str(folder.path), "1", "auto" if url else "offline", ""]
    start = time.monotonic()
    subprocess.run(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=100)
    until(lambda: not processes_of(str(place)))
    return folder, time.monotonic() - start


def test_second_start_keeps_the_id(offline: Offline, tmp_path: Path) -> None:
    folder, _ = track(offline.done.folder, tmp_path)
    first = status(folder)
    folder, _ = track(offline.done.folder, tmp_path)
    assert status(folder)["id"] == first["id"]
    assert history(folder) == folder.metrics()


def test_host_that_refuses_the_run_leaves_an_offline_one(offline: Offline, tmp_path: Path) -> None:
    with host("refuse") as url:
        folder, seconds = track(offline.done.folder, tmp_path, url)
    assert seconds < BOUND
    assert status(folder)["mode"] == "offline"
    assert "W&B refused the run: " in status(folder)["reason"]
    assert history(folder) == folder.metrics()


def test_host_that_falls_silent_is_waited_for_no_longer_than_asked(offline: Offline, tmp_path: Path) -> None:
    with host("silent") as url:
        _, seconds = track(offline.done.folder, tmp_path, url, finish_timeout=4)
    assert seconds < BOUND
