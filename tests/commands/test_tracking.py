"""Weights & Biases for real: what an offline run holds, and that W&B can neither stop, slow nor outlive a run."""

from __future__ import annotations

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
from common.runs.folder import RunFolder, read_json, write_json
from common.runs.tracking import wandb_rows
from common.runs.tracking.wandb_tracker import Tracker, send_missing_rows
from common.system.errors import UserError
from common.system.processes import Process
from configs.mnist_pipeline import Config
from configs.shared import Wandb
from tests.harness import warm
from tests.harness.made_runs import Made
from tests.harness.processes import Done, command, environment, run, values_of, wait_until
from tests.harness.shared import make_once
from tests.harness.tracked_runs import (
    SECRET,
    chosen_rows,
    exit_code,
    history,
    inspect,
    kill_rank,
    of_type,
    offline_history,
    records,
    status,
    track,
)

LONG = ("epochs=1000", "steps=0", "log.seconds=0.1", "wandb.finish_timeout=200")
BOUND = 15.0  # seconds; the ends under test take up to 4, without their bounds 20 and more


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
    seen_in_training: bytes
    """Those before it had a result."""
    records: list[dict[str, Any]]
    """What W&B wrote."""


@pytest.fixture(scope="module")
def offline(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Offline:
    """A short run with a key in its environment."""

    def make(place: Path) -> None:
        words = ["data.name=digits", f"data.cache={cache}", "data.test_limit=1000", "epochs=1", "steps=30"]
        full = command(
            "mnist_pipeline", *words, "wandb.tags=[mine]", "wandb.finish_timeout=200", runs=place / "run" / "my runs"
        )
        env = environment(WANDB_MODE="offline", WANDB_API_KEY=SECRET, HOME=str(place / "run" / "home"))
        env[warm.REAL] = "the tracker's command line is looked at"
        process = warm.Command(full, env=env)
        seen: dict[str, bytes] = {"training": b"", "later": b""}
        while process.poll() is None:
            found = arguments()
            is_over = any((place / "run").glob("my runs/*/result.json"))
            seen["later" if is_over else "training"] += found
            time.sleep(0.05)
        for name, text in seen.items():
            (place / name).write_bytes(text)
        said = {"status": process.returncode, "out": process.out + process.err}
        write_json(place / "done.json", said)
        assert process.returncode == 0, said
        (path,) = (place / "run" / "my runs").iterdir()
        write_json(place / "records.json", {"records": records(RunFolder(path))})

    place = make_once(tmp_path_factory, "offline", make)
    said = read_json(place / "done.json")
    done = Done(said["status"], said["out"], "", place / "run" / "my runs")
    training, later = ((place / name).read_bytes() for name in ("training", "later"))
    return Offline(done, training + later, training, read_json(place / "records.json")["records"])


def test_offline_run_says_how_to_upload(offline: Offline) -> None:
    assert offline.done.status == 0, offline.done.out
    place = status(offline.done.folder)
    assert place["mode"] == "offline"
    path = shlex.quote(shlex.quote(str(offline.done.folder.path)))
    assert f"W&B: offline; upload the run with: make sync RUNS={path}" in offline.done.out
    assert Path(place["dir"]).is_relative_to(offline.done.folder.path / "wandb")


def test_rows_of_metrics_are_in_the_history(offline: Offline) -> None:
    rows = offline.done.folder.read_metrics()
    assert len(rows) > 30, "metrics.jsonl has every step"
    assert history(offline.records) == chosen_rows(offline.done.folder)
    evaluations = [row for row in rows if "test_loss" in row]
    assert [row for row in history(offline.records) if "test_loss" in row] == evaluations


def test_nothing_of_wandb_runs_while_an_offline_run_trains(offline: Offline) -> None:
    def mentions(text: bytes) -> list[bytes]:
        words = (line for line in text.split(b"\n") if str(offline.done.runs).encode() in line)
        return [line for line in words if b"wandb_process" in line]

    assert offline.seen_in_training
    assert mentions(offline.seen) and not mentions(offline.seen_in_training)


def test_steps_are_the_axis_of_every_metric(offline: Offline) -> None:
    metrics = of_type(offline.records, "metric")
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
    result = {name: value for name, value in values_of(folder).items() if isinstance(value, int | float | str)}
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


def test_a_second_start_keeps_the_id(offline: Offline, tmp_path: Path) -> None:
    first = status(offline.done.folder)["id"]
    folder, _ = track(offline.done.folder, tmp_path, own=first)
    assert status(folder)["id"] == first
    assert history(records(folder)) == chosen_rows(folder)


@pytest.fixture
def slow(tmp_path: Path) -> RunFolder:
    """A finished run that W&B is to get every row of."""
    settings = {"wandb.tags": "[mine]"}
    return Made("mnist_pipeline", steps=30, step_seconds=0.2, settings=settings).write(tmp_path / "slow")


def test_a_second_attempt_is_tracked_with_its_own_settings_and_its_new_steps_and_media(
    slow: RunFolder, tmp_path: Path
) -> None:
    source = copy_with_two_starts(slow, tmp_path / "source")
    first, second = source.list_attempts()
    wandb_rows.write_note(first, wandb_rows.TrackingNote(25 + 4, complete=True))
    changed = {"wandb.tags": [["mine"], ["mine", "longer"]], "wandb.group": ["", "pair"], "optim.lr": ["0.02", "0.01"]}
    changed |= {"data.name": ["digits", f"/far/away/{'x' * 80}.py:load"]}
    write_json(second.attempt_folder / "changed.json", changed | {"wandb.model": ["true", "false"]})
    media.write_image(second, 27, "digit", torch.zeros(4, 4))
    media.write_histogram(second, 29, "weights", torch.arange(5.0))
    with open(second.attempt_folder / media.LIST, "a") as file:
        file.write('{"damaged\n{"cut o')
    redone = list(source.list_attempts()[1].read_attempt_rows())
    assert [row["global_step"] for row in redone[:2]] == [21, 22], "the first start had got to step 25"
    folder, _ = track(source, tmp_path / "place", number=2, keep=True)
    found = records(folder)
    (started,) = of_type(found, "run")
    assert started["run_group"] == "pair" and {"mine", "longer"} <= set(started["tags"])
    assert "data:" + "x" * 59 in started["tags"], "W&B takes 64 characters"
    assert '"lr":0.01' in json.dumps(started).replace("\\", "").replace(" ", "")
    assert "model.safetensors" not in json.dumps(found)
    assert not changed_settings.read_changes_of_attempts(source.path).keys() - {"optim.lr", "data.name"}, (
        "tracking does not change the training"
    )
    rows = history(found)
    assert [row["global_step"] for row in rows if "loss" in row] == list(range(26, 31)), "each step once"
    assert [row["global_step"] for row in rows if "test_loss" in row] == [30]
    kinds = {name: row["global_step"] for row in rows for name in row if name.endswith("._type")}
    assert kinds == {"digit._type": 27, "weights._type": 29}


def test_what_wandb_misses_of_a_killed_attempt_comes_with_the_next(slow: RunFolder, tmp_path: Path) -> None:
    """The first was killed with its host: it has rows up to step 25, and the second resumed it at 20."""
    source = copy_with_two_starts(slow, tmp_path / "source")
    wandb_rows.write_note(source.list_attempts()[0], wandb_rows.TrackingNote())
    folder, _ = track(source, tmp_path / "place", number=2)
    assert offline_history(folder) == chosen_rows(folder)
    steps = [row["global_step"] for row in offline_history(folder) if "loss" in row]
    assert steps == list(range(1, 31)), "each step once"
    assert not wandb_rows.list_incomplete_notes(folder)
    *_, early, _, _, late = (record["item"] for record in of_type(records(folder), "history"))
    duration = late["_timestamp"] - early["_timestamp"]
    assert duration == pytest.approx(late["time"] - early["time"], abs=1e-3), "rows have the time of training"


def test_a_conversion_that_is_killed_leaves_no_rows(slow: RunFolder, tmp_path: Path) -> None:
    """Killed before it counted, or after that and before the notes were written."""
    folder, _ = track(slow, tmp_path / "place")
    (attempt,) = folder.list_attempts()
    (made,) = folder.path.glob("wandb/offline-run-*")
    wandb_rows.write_note(attempt, wandb_rows.TrackingNote())
    wandb_rows.restore_notes_of_offline_folders(folder)
    assert not wandb_rows.list_incomplete_notes(folder), "the folder was in its place already"

    unfinished = folder.path / "wandb" / "unfinished" / "wandb"
    unfinished.mkdir(parents=True)
    made.rename(unfinished / made.name)
    wandb_rows.write_note(attempt, wandb_rows.TrackingNote())
    temporary = tmp_path / "wandb-run-0"
    temporary.mkdir()
    note = {"path": str(temporary), "host": os.uname().nodename}
    write_json(folder.path / "wandb" / "temporary.json", note)
    again, _ = track(folder, tmp_path / "again", number=1, keep=True)
    assert offline_history(again) == chosen_rows(again)
    assert not temporary.exists() and not (again.path / "wandb" / "unfinished").exists()


def test_a_run_that_left_no_result_ends_as_failed(tmp_path: Path) -> None:
    folder, _ = track(Made("mnist_pipeline", 0, 20, state="lost").write(tmp_path / "source"), tmp_path / "place")
    assert exit_code(records(folder)) == 1


def copy_with_two_starts(whole: RunFolder, place: Path) -> RunFolder:
    """A run as if it had been cut off after step 25, and gone on from a checkpoint of step 20."""
    folder = RunFolder(place / whole.path.name)
    shutil.copytree(whole.path, folder.path, ignore=shutil.ignore_patterns("wandb", "code"))
    first, second = folder.list_attempts()[0], folder.claim_attempt()
    lines = first.metrics_file.read_text().splitlines(keepends=True)
    steps = [json.loads(line)["global_step"] for line in lines]
    first.metrics_file.write_text("".join(line for line, step in zip(lines, steps, strict=True) if step <= 25))
    second.metrics_file.write_text("".join(line for line, step in zip(lines, steps, strict=True) if step > 20))
    second.record_parent_attempt(1, 20, sum(step <= 20 for step in steps))
    return folder


def test_the_model_is_an_artifact(offline: Offline) -> None:
    found = of_type(offline.records, "request") + of_type(offline.records, "artifact")
    text = json.dumps(found)
    assert "model.safetensors" in text and "model.json" in text and f"{offline.done.folder.path.name}-model" in text


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


def test_a_killed_stage_is_named_and_what_came_before_is_kept(tmp_path: Path, digits: tuple[str, ...]) -> None:
    process, folder, pid = kill_rank(1, (*digits, *LONG), tmp_path, BOUND)
    said = process.out + process.err
    assert process.returncode == 128 + signal.SIGKILL
    assert f"error: rank 1 (pid {pid}) was killed by SIGKILL" in said
    assert "Traceback" not in said
    assert f"make sync RUNS={folder.path}" in said
    assert folder.result["state"] == "failed"
    assert len(folder.read_metrics()) > 1
    found = records(folder)
    assert history(found) == chosen_rows(folder)
    assert exit_code(found) == process.returncode


def start_offline(place: Path, steps: int = 10) -> tuple[Tracker, RunFolder]:
    """The tracking of a finished run, offline."""
    settings = {"wandb.mode": "offline", "wandb.finish_timeout": "1"}
    made = Made("mnist_pipeline", steps=steps, step_seconds=0.2, settings=settings).write(place / "runs")
    folder = made.list_attempts()[0]
    (folder.attempt_folder / "logs").mkdir(exist_ok=True)
    cfg = Config(wandb=Wandb(mode="offline"))
    tracker = Tracker.start(cfg, folder)
    assert tracker is not None and tracker.process is None
    return tracker, folder


def test_a_tracker_that_breaks_only_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "fake" / "wandb" / "__init__.py"
    fake.parent.mkdir(parents=True)
    fake.write_text("raise OSError(28, 'No space left on device')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracker, folder = start_offline(tmp_path)
    said = tracker.finish(20)
    assert said.startswith("W&B: offline; upload the run with: make sync")
    assert "tracking is incomplete: the tracking process failed with exit status 1, see " in said
    assert "No space left" in (folder.attempt_folder / "logs" / "tracker.log").read_text()
    fake.write_text("import time\ntime.sleep(1.2)\nraise OSError(28, 'No space left on device')\n")
    with pytest.raises(UserError, match=r"missing from W&B; .* the tracking process failed with exit status 1; see "):
        send_missing_rows(folder)  # wandb.finish_timeout, here 1 s, is not for make sync


def test_a_tracker_that_was_killed_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not as one that had too little time; no process and nothing temporary stays."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracker, folder = start_offline(tmp_path, steps=5000)  # which take W&B a moment
    note = folder.path / "wandb" / "temporary.json"
    places: list[Path] = []
    clients: list[Process] = []

    def kill() -> None:
        wait_until(lambda: read_json(note).get("processes"), "W&B's client runs", pause=0.01)
        places.append(Path(read_json(note)["path"]))
        clients.extend(Process(pid, start) for pid, start in read_json(note)["processes"])
        os.kill(clients[0].pid, signal.SIGSTOP)  # else it might end by itself meanwhile
        assert tracker.process is not None
        tracker.process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    start = time.monotonic()
    said = tracker.finish(60)
    thread.join()
    assert "; tracking is incomplete: the tracking process was killed by SIGKILL, see " in said and "60 s" not in said
    assert time.monotonic() - start < BOUND
    assert not places[0].exists() and not note.exists()
    assert clients and not any(process.is_alive() for process in clients)
    assert wandb_rows.list_incomplete_notes(folder), "make sync passes it on"


def test_tracker_without_room_does_not_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wandb").touch()
    assert Tracker.start(Config(), RunFolder(tmp_path, 1)) is None
    assert "W&B: tracking could not be started" in capsys.readouterr().out
