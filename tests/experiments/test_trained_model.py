"""The trained model of a run: measured again, read without this project, and the beginning of other runs."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import rank_file, storage
from common.data.prepare import hash_file
from common.models import model_file
from common.runs import progress
from common.runs.folder import RunFolder, write_json
from slurm.reports import trained_model
from tests.harness import inside
from tests.harness.processes import run
from tests.harness.registry import REPLICATED, TRAINING, Entry
from tests.harness.resuming import resume
from tests.harness.shared import Make

every = pytest.mark.parametrize("entry", TRAINING, ids=lambda entry: entry.name)
READ = """
import json, sys
from safetensors.numpy import load_file
found = load_file(sys.argv[1])
print(json.dumps({name: [value.dtype.name, list(value.shape), float(value.sum())] for name, value in found.items()}))
assert not {"common", "torch"} & set(sys.modules)
"""


def evaluate(folder: RunFolder, *words: str) -> subprocess.CompletedProcess[str]:
    return inside.run_verb("evaluate", *words, "--", str(folder.path))


def copy(folder: RunFolder, place: Path) -> RunFolder:
    shutil.copytree(folder.path, place / folder.path.name)
    return RunFolder(place / folder.path.name)


def joined(folder: RunFolder) -> dict[str, torch.Tensor]:
    """The model in the checkpoint of the last step."""
    newest = storage.list_resumable_checkpoints(folder)[0]
    assert newest.step == json.loads((folder.path / "model.json").read_text())["step"]
    return rank_file.read_full_model(newest)


@every
def test_a_finished_model_gives_the_numbers_of_its_run(entry: Entry, finished: Make) -> None:
    folder = finished(entry).folder
    done = evaluate(folder)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    right = round(folder.result["scores"]["test_accuracy"] * 333)
    assert f"correct     {right} of 333" in done.stdout and f"recorded by the run: {right}\n" in done.stdout


@every
def test_the_model_file_is_read_without_the_project(entry: Entry, finished: Make, tmp_path: Path) -> None:
    folder = finished(entry).folder
    line = [sys.executable, "-P", "-c", READ, str(folder.path / "model.safetensors")]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found, trained_last = json.loads(done.stdout), joined(folder)
    model = model_file.build_model(json.loads((folder.path / "model.json").read_text()))
    assert found.keys() == model.state_dict().keys() and found.keys() <= trained_last.keys()
    for name, (kind, shape, total) in found.items():
        value = trained_last[name]
        assert f"torch.{kind}" == str(value.dtype) and shape == list(value.shape)
        assert total == pytest.approx(float(value.double().sum()), rel=1e-4, abs=1e-4)
    kept = load_file(folder.path / "model.safetensors")
    assert all(torch.equal(kept[name], trained_last[name]) for name in kept)


def test_another_model_gives_other_numbers(finished: Make, tmp_path: Path) -> None:
    folder = copy(finished(REPLICATED).folder, tmp_path)
    state = load_file(folder.path / "model.safetensors")
    name = next(name for name in state if name.endswith("weight"))
    state[name] = -state[name]
    save_file(state, folder.path / "model.safetensors")
    assert "is damaged: its checksum differs" in evaluate(folder).stderr
    facts = json.loads((folder.path / "model.json").read_text())
    digest = hash_file(folder.path / "model.safetensors")
    write_json(folder.path / "model.json", facts | {"sha256": digest})
    done = evaluate(folder)
    assert done.returncode == trained_model.EXIT_DIFFERENT and "DIFFERENT" in done.stdout


def test_other_samples_are_measured_and_not_compared(
    finished: Make, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    folder = finished(REPLICATED).folder
    done = evaluate(folder, "--args=data.test_limit=100 eval_batch=30")
    assert done.returncode == 0 and " of 100 (" in done.stdout and "not compared" in done.stdout
    shown = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("evaluation")]
    assert shown[:2] == ["0/100", "25/100"] and shown[-1] == "100/100", "the progress of both shards"
    done = evaluate(folder, f"--args=data.name=generated data.samples=200 data.cache={cache}")
    assert done.returncode == 2 and "the model takes images of shape [28, 28]" in done.stderr


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "model.json").write_text("{"), "model.json is missing, damaged"),
        (lambda path: (path / "model.json").unlink(), "model.json is missing, damaged"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x"), "is damaged: its checksum differs"),
        (lambda path: (path / "model.safetensors").unlink(), "cannot be read: No such file"),
        (lambda path: write_json(path / "model.json", {"format": 1, "scores": {}}), "is missing, damaged"),
        (
            lambda path: write_json(
                path / "model.json", json.loads((path / "model.json").read_text()) | {"sha256": "0"}
            ),
            "checksum",
        ),
    ],
)
def test_damaged_files_are_refused(damage: object, words: str, finished: Make, tmp_path: Path) -> None:
    folder = copy(finished(REPLICATED).folder, tmp_path)
    damage(folder.path)  # type: ignore[operator]
    done = evaluate(folder)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_class_of_ones_own_is_named(finished: Make, tmp_path: Path) -> None:
    folder = copy(finished(REPLICATED).folder, tmp_path)
    facts = json.loads((folder.path / "model.json").read_text())
    told = "the network Mine is not in common/models/networks.py; to evaluate or export it, add"
    for own, words in (
        ({"class": "Mine", "arguments": None}, told),
        ({"class": None, "arguments": None}, "the network of this run is not in"),
        ({"arguments": None}, f"lacks the constructor arguments of {facts['class']}; add them"),
    ):
        write_json(folder.path / "model.json", facts | own)
        done = inside.run_verb("export", "--format=torch.export", "--", str(folder.path))
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert words in evaluate(folder).stderr
    done = inside.run_verb("export", "--", str(folder.path))
    assert done.returncode == 0 and str(folder.path / "model.safetensors") in done.stdout, done.stderr


def test_a_run_that_did_not_finish_has_no_model(finished: Make, tmp_path: Path) -> None:
    folder = copy(finished(REPLICATED).folder, tmp_path)
    for name in ("model.safetensors", "model.json", "result.json"):
        (folder.path / name).unlink()
    done = evaluate(folder)
    assert done.returncode == 2 and "has no model.safetensors yet: the run has not finished" in done.stderr
    write_json(folder.path / "result.json", {"format": 2, "state": "failed", "exit_status": 1, "reason": "a bug"})
    done = evaluate(folder)
    path = folder.path
    told = f"the run failed; find the cause with make doctor RUN={path}, then resume with make exp RESUME={path}"
    assert done.returncode == 2 and told in done.stderr


def test_a_model_is_measured_with_the_settings_of_its_newest_start(finished: Make, tmp_path: Path) -> None:
    folder = copy(finished(REPLICATED).folder, tmp_path)
    changes = folder.path / "attempts/0001/changed.json"
    write_json(changes, {"data.test_limit": ["333", "100"]})
    done = evaluate(folder)
    assert done.returncode == 0 and " of 100 " in done.stdout and "not compared" in done.stdout, done.stdout
    changes.write_text('{"data.test_limit": 3}')
    done = evaluate(folder)
    assert done.returncode == 2 and "changed.json is damaged, so the settings of its attempt are unknown" in done.stderr
    told = inside.run_verb("rerun", "--", str(folder.path))
    assert told.returncode == 2 and "changed.json is damaged" in told.stderr
    done = resume(REPLICATED, folder, "steps=50")
    assert done.returncode == 2 and "changed.json is damaged" in done.stderr


def test_a_model_of_another_device_is_measured_and_not_judged(finished: Make, tmp_path: Path) -> None:
    folder = copy(finished(REPLICATED).folder, tmp_path)
    facts = json.loads((folder.path / "model.json").read_text())
    assert facts["device"] == "cpu"
    facts["scores"]["test_loss"] *= 1.001
    write_json(folder.path / "model.json", facts)
    assert evaluate(folder).returncode == trained_model.EXIT_DIFFERENT
    write_json(folder.path / "model.json", facts | {"device": "cuda"})
    done = evaluate(folder)
    assert done.returncode == 0 and "the run was evaluated on cuda, which rounds differently" in done.stdout


def test_a_finished_run_is_trained_on(finished: Make, tmp_path: Path) -> None:
    folder = copy(finished(REPLICATED).folder, tmp_path)
    before = [row["loss"] for row in folder.read_metrics() if "loss" in row]
    for done in (resume(REPLICATED, folder), inside.run_verb("exp", f"--resume={folder.path}", "--launch=local")):
        assert done.returncode == 0 and f'make exp RESUME={folder.path.name} ARGS="steps=80"' in done.stdout
    done = resume(REPLICATED, folder, "steps=40")
    assert done.returncode == 0 and "is finished" in done.stdout
    for ways in (
        resume(REPLICATED, folder, "optim.lr=5"),
        inside.run_verb("exp", f"--resume={folder.path}", "--launch=local", "--args=optim.lr=5"),
    ):
        refused = f"{folder.path.name} is finished: optim.lr 0.02 -> 5.0 has no effect; increase steps"
        assert ways.returncode == 2 and refused in ways.stderr, ways
    with open(folder.path / "config.yaml") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another process that goes on with it
        done = resume(REPLICATED, folder, "steps=50")
    assert done.returncode == 2 and "already running or being started on this machine; wait for it" in done.stderr
    assert len(folder.list_attempts()) == 1
    done = resume(REPLICATED, folder, "steps=50")
    assert done.returncode == 0, done.stderr
    assert (folder.path / "model.safetensors").stat().st_mode & 0o777 == folder.path.stat().st_mode & 0o666
    assert json.loads((folder.path / "attempts/0002/heartbeat-1.json").read_text())["step"] == 50
    assert "extending the run after step 40; the learning rate schedule now covers 50 steps" in done.stdout
    kept = json.loads((folder.path / "attempts/0001/result.json").read_text())
    assert (kept["state"], kept["scores"]["test_samples"]) == ("finished", 333), "how the first start ended"
    rows = folder.read_metrics()
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 50 and losses[:40] == before
    assert [row["global_step"] for row in rows if "test_loss" in row] == [40, 50]
    assert json.loads((folder.path / "model.json").read_text())["step"] == 50
    assert evaluate(folder).returncode == 0
    done = resume(REPLICATED, folder)  # with the length that it has now
    assert done.returncode == 0 and 'ARGS="steps=100"' in done.stdout
    told = inside.run_verb("rerun", "--", str(folder.path))
    assert told.returncode == 2 and "was resumed with different settings (steps 40 -> 50)" in told.stderr
    again = run(REPLICATED.name, "--config", str(folder.path / "config.yaml"), runs=tmp_path / "again")
    assert again.status == 2 and "different settings (steps 40 -> 50), so a single run cannot repeat it" in again.err
    assert not (tmp_path / "again").exists()
    for checkpoint in storage.list_resumable_checkpoints(folder):
        shutil.rmtree(checkpoint.path)
    done = resume(REPLICATED, folder, "steps=60")
    assert done.returncode == 2 and "the checkpoint of its last step (50) is missing" in done.stderr
    done = resume(REPLICATED, folder)
    assert done.returncode == 0 and "is finished" in done.stdout and "train on" not in done.stdout
