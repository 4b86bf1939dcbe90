"""Weights & Biases: the contents of an offline run; W&B neither stops nor delays a run, and does not outlive it."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from common.config import changed_settings
from common.measure import media
from common.runs import description
from common.runs.folder import RunFolder, read_json, write_json
from common.runs.tracking import wandb_rows
from common.runs.tracking.wandb_tracker import Tracker
from common.runs.tracking.wandb_upload import send_missing_rows
from common.system.errors import UserError
from common.system.processes import Process
from configs.mnist_pipeline import Config
from configs.shared import Wandb
from tests.harness.commands import execution
from tests.harness.commands.processes import (
    FinishedRun,
    Settings,
    make_environment,
    make_run_command,
    read_result_values,
    run_experiment,
    wait_until,
)
from tests.harness.environment.shared_results import create_folder_once
from tests.harness.runs.synthetic_runs import SyntheticRun
from tests.harness.runs.tracked_runs import (
    API_KEY,
    LONG_RUN,
    extract_metrics,
    get_exit_code,
    inspect_wandb_folder,
    kill_tracked_rank,
    list_expected_rows,
    read_offline_metrics,
    read_records,
    read_tracking_status,
    select_records,
    track_finished_run,
    write_failing_wandb,
)


def read_command_lines() -> bytes:
    """Return the command lines of all processes of this machine."""
    command_lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command_lines.append(path.read_bytes())
    return b"\n".join(command_lines)


# ---- an offline run


@dataclasses.dataclass
class Offline:
    completed: FinishedRun
    command_lines: bytes
    """Command lines of all processes while the run was executed."""
    command_lines_in_training: bytes
    """Command lines of all processes before the run had a result."""
    records: list[dict[str, Any]]
    """The records that W&B wrote."""


@pytest.fixture(scope="module")
def offline(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Offline:
    """A short run with a key in its environment."""

    def make(place: Path) -> None:
        data = ("data.name=digits", f"data.cache={cache}", "data.test_limit=1000", "epochs=1", "steps=30")
        tracking = ("wandb.tags=[mine]", "wandb.finish_timeout=200", "run.name=wide net", "run.notes=first try")
        arguments = make_run_command("mnist_pipeline", *data, *tracking, runs=place / "run/my runs")
        env = make_environment(WANDB_MODE="offline", WANDB_API_KEY=API_KEY, HOME=str(place / "run/home"))
        env[execution.NO_FORK_VARIABLE] = "the test reads the command line of the tracker"
        process = execution.Command(arguments, env=env)
        command_lines: dict[str, bytes] = {"training": b"", "later": b""}
        while process.poll() is None:
            current = read_command_lines()
            has_result = any((place / "run").glob("my runs/*/result.json"))
            command_lines["later" if has_result else "training"] += current
            time.sleep(0.05)
        for name, text in command_lines.items():
            (place / name).write_bytes(text)
        output = {"status": process.returncode, "out": process.stdout + process.stderr}
        write_json(place / "done.json", output)
        assert process.returncode == 0, output
        (path,) = (place / "run/my runs").iterdir()
        write_json(place / "records.json", {"records": read_records(RunFolder(path))})

    place = create_folder_once(tmp_path_factory, "offline", make)
    output = read_json(place / "done.json")
    completed = FinishedRun(output["status"], output["out"], "", place / "run/my runs")
    training = (place / "training").read_bytes()
    later = (place / "later").read_bytes()
    return Offline(completed, training + later, training, read_json(place / "records.json")["records"])


def test_offline_run_says_how_to_upload(offline: Offline) -> None:
    assert offline.completed.returncode == 0, offline.completed.stdout
    place = read_tracking_status(offline.completed.folder)
    assert place["mode"] == "offline"
    path = shlex.quote(shlex.quote(str(offline.completed.folder.path)))
    assert f"W&B: offline; upload the run with: make sync RUNS={path}" in offline.completed.stdout
    assert Path(place["dir"]).is_relative_to(offline.completed.folder.path / "wandb")


def test_rows_of_metrics_are_in_the_history(offline: Offline) -> None:
    rows = offline.completed.folder.read_metrics()
    assert len(rows) > 30, "metrics.jsonl has every step"
    assert extract_metrics(offline.records) == list_expected_rows(offline.completed.folder)
    evaluations = [row for row in rows if "test_loss" in row]
    assert [row for row in extract_metrics(offline.records) if "test_loss" in row] == evaluations


def test_nothing_of_wandb_runs_while_an_offline_run_trains(offline: Offline) -> None:
    def has_tracking_process(command_lines: bytes) -> bool:
        runs = str(offline.completed.runs).encode()
        return any(runs in line and b"wandb_process" in line for line in command_lines.split(b"\n"))

    assert offline.command_lines_in_training
    assert has_tracking_process(offline.command_lines)
    assert not has_tracking_process(offline.command_lines_in_training)


def test_steps_are_the_axis_of_every_metric(offline: Offline) -> None:
    metrics = select_records(offline.records, "metric")
    assert {"name": "global_step"}.items() <= metrics[0].items()
    assert [m["step_metric"] for m in metrics if m.get("glob_name") == "*"] == ["global_step"]


def test_summary_tags_and_config_are_complete(offline: Offline) -> None:
    folder = offline.completed.folder
    tracked = json.loads(inspect_wandb_folder(folder, "--summary"))
    assert tracked["state"] == "finished"
    assert tracked["exit_code"] == 0
    assert tracked["name"] == "wide net"
    (started,) = select_records(offline.records, "run")
    assert started["notes"] == "first try"
    assert tracked["run_id"] == read_tracking_status(folder)["id"]
    assert tracked["project"] == "distributed-experiments"
    assert set(tracked["tags"]) == {"mnist_pipeline", "data:digits", "world_size:2", "mine"}
    result = {name: value for name, value in read_result_values(folder).items() if isinstance(value, int | float | str)}
    assert result.items() <= tracked["summary"].items()
    settings = yaml.safe_load((folder.path / "config.yaml").read_text())
    config = tracked["config"]
    assert settings.items() <= config.items()
    assert (config["experiment"], config["world_size"], config["data"]["name"]) == ("mnist_pipeline", 2, "digits")
    meta = read_json(folder.path / "meta.json")
    assert config["run_folder"] == folder.path.name
    assert config["meta"]["git"] == meta["git"]["sha"]
    assert config["meta"]["packages"] == meta["packages"]


def test_the_api_key_is_in_no_file_and_no_command_line(offline: Offline) -> None:
    root = offline.completed.runs.parent
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 20
    assert not [path for path in files if API_KEY.encode() in path.read_bytes()]
    assert str(offline.completed.folder.path).encode() in offline.command_lines, "the tracking process was not found"
    assert API_KEY.encode() not in offline.command_lines


@pytest.mark.slow
def test_a_second_start_keeps_the_id(offline: Offline, tmp_path: Path) -> None:
    first = read_tracking_status(offline.completed.folder)["id"]
    folder = track_finished_run(offline.completed.folder, tmp_path, wandb_id=first)
    assert read_tracking_status(folder)["id"] == first
    assert extract_metrics(read_records(folder)) == list_expected_rows(folder)


@pytest.fixture
def slow(tmp_path: Path) -> RunFolder:
    """A finished run whose steps are slow, so that W&B gets every row."""
    settings = {"wandb.tags": "[mine]"}
    return SyntheticRun("mnist_pipeline", steps=30, step_seconds=0.2, settings=settings).write(tmp_path / "slow")


def test_a_second_attempt_is_tracked_with_its_own_settings_and_its_new_steps_and_media(
    slow: RunFolder, tmp_path: Path
) -> None:
    source = copy_with_two_starts(slow, tmp_path / "source")
    description.write_notes(source, "written later")
    first, second = source.list_attempts()
    wandb_rows.write_note(first, wandb_rows.TrackingNote(25 + 4, complete=True))
    changed = {"wandb.tags": [["mine"], ["mine", "longer"]], "wandb.group": ["", "pair"], "optim.lr": ["0.02", "0.01"]}
    changed |= {"data.name": ["digits", f"/far/away/{'x' * 80}.py:load"]}
    write_json(second.attempt_folder / "changed.json", changed | {"wandb.model": ["true", "false"]})
    media.write_image(second, 27, "digit", torch.zeros(4, 4))
    media.write_histogram(second, 29, "weights", torch.arange(5.0))
    with open(second.attempt_folder / media.LIST, "a") as file:
        file.write('{"damaged\n{"cut o')
    repeated_rows = list(source.list_attempts()[1].read_attempt_rows())
    assert [row["global_step"] for row in repeated_rows[:2]] == [21, 22], "the first attempt ended after step 25"
    folder = track_finished_run(source, tmp_path / "place", number=2, keep_wandb_files=True)
    tracked = read_records(folder)
    (started,) = select_records(tracked, "run")
    assert started["run_group"] == "pair"
    assert started["display_name"] == folder.path.name
    assert started["notes"] == "written later"
    assert {"mine", "longer"} <= set(started["tags"])
    assert "data:" + "x" * 59 in started["tags"], "W&B accepts 64 characters"
    assert '"lr":0.01' in json.dumps(started).replace("\\", "").replace(" ", "")
    assert "model.safetensors" not in json.dumps(tracked)
    changes = changed_settings.read_changes_of_attempts(source.path)
    assert changes.keys() <= {"optim.lr", "data.name"}, "settings of W&B do not change the training"
    rows = extract_metrics(tracked)
    assert [row["global_step"] for row in rows if "loss" in row] == list(range(26, 31)), "each step once"
    assert [row["global_step"] for row in rows if "test_loss" in row] == [30]
    media_steps: dict[str, int] = {}
    for row in rows:
        media_steps |= {name: row["global_step"] for name in row if name.endswith("._type")}
    assert media_steps == {"digit._type": 27, "weights._type": 29}


@pytest.mark.slow
def test_the_missing_rows_of_a_killed_attempt_are_sent_with_the_next_attempt(slow: RunFolder, tmp_path: Path) -> None:
    """The first attempt was killed with its host after step 25, and the second resumed from step 20."""
    source = copy_with_two_starts(slow, tmp_path / "source")
    wandb_rows.write_note(source.list_attempts()[0], wandb_rows.TrackingNote())
    folder = track_finished_run(source, tmp_path / "place", number=2)
    assert read_offline_metrics(folder) == list_expected_rows(folder)
    steps = [row["global_step"] for row in read_offline_metrics(folder) if "loss" in row]
    assert steps == list(range(1, 31)), "each step once"
    assert not wandb_rows.list_incomplete_notes(folder)
    rows = [record["item"] for record in select_records(read_records(folder), "history")]
    duration = rows[-1]["_timestamp"] - rows[-4]["_timestamp"]
    assert duration == pytest.approx(rows[-1]["time"] - rows[-4]["time"], abs=1e-3), "rows have the time of training"


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_rows(slow: RunFolder, tmp_path: Path) -> None:
    """The conversion is killed after it moved the folder but before it wrote the notes, or before both."""
    folder = track_finished_run(slow, tmp_path / "place")
    (attempt,) = folder.list_attempts()
    (offline_folder,) = folder.path.glob("wandb/offline-run-*")
    wandb_rows.write_note(attempt, wandb_rows.TrackingNote())
    wandb_rows.restore_notes_of_offline_folders(folder)
    assert not wandb_rows.list_incomplete_notes(folder), "the folder had been moved"

    unfinished = folder.path / "wandb/unfinished/wandb"
    unfinished.mkdir(parents=True)
    offline_folder.rename(unfinished / offline_folder.name)
    wandb_rows.write_note(attempt, wandb_rows.TrackingNote())
    temporary = tmp_path / "wandb-run-0"
    temporary.mkdir()
    note = {"path": str(temporary), "host": os.uname().nodename}
    write_json(folder.path / "wandb/temporary.json", note)
    again = track_finished_run(folder, tmp_path / "again", number=1, keep_wandb_files=True)
    assert read_offline_metrics(again) == list_expected_rows(again)
    assert not temporary.exists()
    assert not (again.path / "wandb/unfinished").exists()


@pytest.mark.slow
def test_a_run_without_a_result_is_tracked_as_failed(tmp_path: Path) -> None:
    folder = track_finished_run(
        SyntheticRun("mnist_pipeline", 0, 20, state="lost").write(tmp_path / "source"), tmp_path / "place"
    )
    assert get_exit_code(read_records(folder)) == 1


def copy_with_two_starts(run_folder: RunFolder, place: Path) -> RunFolder:
    """Copy a run as if it had been killed after step 25 and resumed from a checkpoint of step 20."""
    folder = RunFolder(place / run_folder.path.name)
    shutil.copytree(run_folder.path, folder.path, ignore=shutil.ignore_patterns("wandb", "code"))
    first = folder.list_attempts()[0]
    second = folder.claim_attempt()
    lines = first.metrics_file.read_text().splitlines(keepends=True)
    steps = [json.loads(line)["global_step"] for line in lines]
    count_until_20 = bisect.bisect_right(steps, 20)
    count_until_25 = bisect.bisect_right(steps, 25)
    first.metrics_file.write_text("".join(lines[:count_until_25]))
    second.metrics_file.write_text("".join(lines[count_until_20:]))
    second.record_parent_attempt(1, 20, count_until_20)
    return folder


def test_the_model_is_an_artifact(offline: Offline) -> None:
    tracked = select_records(offline.records, "request") + select_records(offline.records, "artifact")
    text = json.dumps(tracked)
    assert "model.safetensors" in text
    assert "model.json" in text
    assert f"{offline.completed.folder.path.name}-model" in text


# ---- switched off


@pytest.mark.parametrize("mode, environ", [("wandb.mode=disabled", ""), ("wandb.mode=offline", "disabled")])
def test_disabled_leaves_no_trace(tmp_path: Path, digits: Settings, mode: str, environ: str) -> None:
    settings = (*digits, "stages=1", "microbatches=1", "steps=3", mode)
    completed = run_experiment(
        "mnist_pipeline", *settings, runs=tmp_path, WANDB_MODE=environ, HOME=str(tmp_path.parent)
    )
    assert not (completed.folder.path / "wandb").exists()
    assert not (completed.folder.path / "attempts/0001/logs/tracker.log").exists()
    assert "W&B" not in completed.stdout


# ---- killed and failing processes


@pytest.mark.slow
def test_a_killed_stage_is_named_and_earlier_rows_are_kept(tmp_path: Path, digits: Settings) -> None:
    process, folder, pid = kill_tracked_rank(1, (*digits, *LONG_RUN), tmp_path)
    output = process.stdout + process.stderr
    assert process.returncode == 128 + signal.SIGKILL
    assert f"error: rank 1 (pid {pid}) was killed by SIGKILL" in output
    assert "Traceback" not in output
    assert f"make sync RUNS={folder.path}" in output
    assert folder.result["state"] == "failed"
    assert len(folder.read_metrics()) > 1
    tracked = read_records(folder)
    assert extract_metrics(tracked) == list_expected_rows(folder)
    assert get_exit_code(tracked) == process.returncode


def start_offline(place: Path, steps: int = 10) -> tuple[Tracker, RunFolder]:
    """Start the offline tracking of a finished run."""
    settings = {"wandb.mode": "offline", "wandb.finish_timeout": "1"}
    run_folder = SyntheticRun("mnist_pipeline", steps=steps, step_seconds=0.2, settings=settings).write(place / "runs")
    folder = run_folder.list_attempts()[0]
    (folder.attempt_folder / "logs").mkdir(exist_ok=True)
    cfg = Config(wandb=Wandb(mode="offline"))
    tracker = Tracker.start(cfg, folder)
    assert tracker is not None
    assert tracker.process is None
    return tracker, folder


def test_a_failing_tracking_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", write_failing_wandb(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracker, folder = start_offline(tmp_path)
    output = tracker.finish(20)
    assert output.startswith("W&B: offline; upload the run with: make sync")
    assert "tracking is incomplete: the tracking process failed with exit status 1, see " in output
    assert "No space left" in (folder.attempt_folder / "logs/tracker.log").read_text()
    write_failing_wandb(tmp_path, "import time\ntime.sleep(1.2)\n")
    with pytest.raises(UserError, match=r"missing from W&B; .* the tracking process failed with exit status 1; see "):
        send_missing_rows(folder)  # make sync ignores wandb.finish_timeout, here 1 s


def test_tracking_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of an experiment can be started in any folder, for example in another checkout."""
    monkeypatch.setenv("PYTHONPATH", write_failing_wandb(tmp_path).rstrip(os.pathsep))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("print('imported from the current folder', flush=True)\n")
    monkeypatch.chdir(tmp_path)
    tracker, folder = start_offline(tmp_path)
    tracker.finish(20)
    log = (folder.attempt_folder / "logs/tracker.log").read_text()
    assert "No space left" in log
    assert "imported from the current folder" not in log


@pytest.mark.slow
def test_a_killed_tracking_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported immediately and not as a timeout; no process and no temporary file remains."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracker, folder = start_offline(tmp_path, steps=5000)  # W&B needs some time for these
    note = folder.path / "wandb/temporary.json"
    places: list[Path] = []
    clients: list[Process] = []

    def kill() -> None:
        wait_until(lambda: read_json(note).get("processes"), "W&B's client runs", pause=0.01)
        places.append(Path(read_json(note)["path"]))
        clients.extend(Process(pid, start) for pid, start in read_json(note)["processes"])
        os.kill(clients[0].pid, signal.SIGSTOP)  # otherwise it may exit before
        assert tracker.process is not None
        tracker.process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    output = tracker.finish(3600)  # longer than the time limit of this test
    thread.join()
    assert "; tracking is incomplete: the tracking process was killed by SIGKILL, see " in output
    assert "3600 s" not in output
    assert not places[0].exists()
    assert not note.exists()
    assert clients
    for process in clients:
        assert not process.is_alive()
    assert wandb_rows.list_incomplete_notes(folder), "make sync sends the rows"


def test_tracker_without_room_does_not_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wandb").touch()
    assert Tracker.start(Config(), RunFolder(tmp_path, 1)) is None
    assert "W&B: tracking could not be started" in capsys.readouterr().out
