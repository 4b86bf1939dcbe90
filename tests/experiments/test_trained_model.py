"""The trained model of a run is evaluated, read without this project, and trained further."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import rank_file, storage
from common.data.prepare import hash_file
from common.models import model_file
from common.runs import progress
from common.runs.folder import RunFolder, read_json, write_json
from slurm.reports import trained_model
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import Settings, make_environment, run_experiment
from tests.harness.environment.randomness import draw_cases
from tests.harness.environment.read_only import mount_read_only
from tests.harness.environment.shared_results import GetRun
from tests.harness.experiments.registry import REPLICATED_ENTRY, TRAINING_ENTRIES, Entry
from tests.harness.runs.resuming import resume_run

every = pytest.mark.parametrize("entry", TRAINING_ENTRIES, ids=lambda entry: entry.name)
READ_MODEL = """
import json, sys
from safetensors.numpy import load_file
arrays = load_file(sys.argv[1])
print(json.dumps({name: [array.dtype.name, list(array.shape), float(array.sum())] for name, array in arrays.items()}))
assert not {"common", "torch"} & set(sys.modules)
"""


def evaluate(folder: RunFolder, *options: str, status: int = 0) -> Completed:
    return in_process_calls.call_verb("evaluate", *options, "--", str(folder.path), status=status)


def copy(folder: RunFolder, target: Path) -> RunFolder:
    shutil.copytree(folder.path, target / folder.path.name)
    return RunFolder(target / folder.path.name)


@pytest.fixture
def finished_copy(finished: GetRun, tmp_path: Path) -> RunFolder:
    """A copy of a finished run, which the test may change."""
    return copy(finished(REPLICATED_ENTRY).folder, tmp_path)


def read_model_facts(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.path / "model.json")


def read_last_checkpoint(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Return the model in the checkpoint of the last step."""
    newest = storage.list_resumable_checkpoints(folder)[0]
    assert newest.step == read_model_facts(folder)["step"]
    return rank_file.read_full_model(newest)


@every
def test_an_evaluation_reproduces_the_scores_of_the_run(entry: Entry, finished: GetRun) -> None:
    folder = finished(entry).folder
    completed = evaluate(folder)
    assert not completed.stderr, completed.stdout + completed.stderr
    assert "relative difference: 0\n" in completed.stdout
    if not entry.has_accuracy:
        return
    correct = round(folder.result["scores"]["test_accuracy"] * 333)
    assert f"correct     {correct} of 333" in completed.stdout
    assert f"recorded by the run: {correct}\n" in completed.stdout


@pytest.mark.parametrize("entry", draw_cases("model files", TRAINING_ENTRIES, 3), ids=lambda entry: entry.name)
def test_the_model_file_is_read_without_the_project(entry: Entry, finished: GetRun, tmp_path: Path) -> None:
    folder = finished(entry).folder
    command = [sys.executable, "-P", "-c", READ_MODEL, str(folder.path / "model.safetensors")]
    completed = execution.execute_command(command, cwd=tmp_path, env=make_environment(), real_process=True, status=0)
    arrays = json.loads(completed.stdout)
    checkpoint = read_last_checkpoint(folder)
    model = model_file.build_model(read_model_facts(folder))
    assert arrays.keys() == model.state_dict().keys()
    assert arrays.keys() <= checkpoint.keys()
    for name, (dtype, shape, total) in arrays.items():
        tensor = checkpoint[name]
        assert f"torch.{dtype}" == str(tensor.dtype)
        assert shape == list(tensor.shape)
        assert total == pytest.approx(float(tensor.double().sum()), rel=1e-4, abs=1e-4)
    for name, tensor in load_file(folder.path / "model.safetensors").items():
        assert torch.equal(tensor, checkpoint[name])


OTHER_CLASSES = """import numpy as np


def load(root):
    images = np.zeros((22, 28, 28), np.uint8)
    labels = np.arange(22) % 11
    return images, labels, images, labels
"""


def test_data_with_other_classes_than_the_model_is_refused(finished: GetRun, tmp_path: Path) -> None:
    file = tmp_path / "eleven.py"
    file.write_text(OTHER_CLASSES)
    arguments = f"--args=data.name={file}:load data.cache={tmp_path}"
    completed = evaluate(finished(REPLICATED_ENTRY).folder, arguments, status=2)
    assert "the model has the classes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, but" in completed.stderr, completed.stderr
    assert "has 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10; use data with the classes of the model" in completed.stderr


@pytest.mark.slow
def test_the_best_checkpoint_of_another_score_is_chosen_again(digits: Settings, tmp_path: Path) -> None:
    """The accuracies of the resumed run are not compared with the losses of the first attempt."""
    small = (*digits, "data.train_limit=200", "steps=0", "checkpoint.every_steps=5")
    first = run_experiment(REPLICATED_ENTRY.name, *small, "epochs=1", "checkpoint.best=test_loss", runs=tmp_path)
    resumed = resume_run(REPLICATED_ENTRY, first.folder, "epochs=2", "checkpoint.best=test_accuracy")
    assert "best" in {path.name for path in (first.folder.path / "attempts/0002/checkpoints").iterdir()}, resumed.stdout


def test_a_changed_model_gives_different_scores(finished_copy: RunFolder) -> None:
    folder = finished_copy
    state = load_file(folder.path / "model.safetensors")
    name = next(name for name in state if name.endswith("weight"))
    state[name] = -state[name]
    save_file(state, folder.path / "model.safetensors")
    assert "is damaged: its checksum differs" in evaluate(folder, status=2).stderr
    digest = hash_file(folder.path / "model.safetensors")
    write_json(folder.path / "model.json", read_model_facts(folder) | {"sha256": digest})
    completed = evaluate(folder, status=trained_model.EXIT_DIFFERENT)
    assert "DIFFERENT" in completed.stdout


def test_an_evaluation_on_other_samples_is_not_compared(
    finished: GetRun, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    folder = finished(REPLICATED_ENTRY).folder
    completed = evaluate(folder, "--args=data.test_limit=100 eval_batch=30")
    assert " of 100 (" in completed.stdout
    assert "not compared" in completed.stdout
    progress_lines = [line.split()[1] for line in completed.stdout.splitlines() if line.startswith("evaluation")]
    assert progress_lines[:2] == ["0/100", "25/100"]
    assert progress_lines[-1] == "100/100", "the progress of both shards"
    completed = evaluate(folder, f"--args=data.name=generated data.samples=200 data.cache={cache}", status=2)
    assert "the model takes inputs of shape [28, 28]" in completed.stderr


DAMAGES = [
    ("model.json", b"{", "model.json is missing, damaged"),
    ("model.json", None, "model.json is missing, damaged"),
    ("model.safetensors", b"x", "is damaged: its checksum differs"),
    ("model.safetensors", None, "cannot be read: No such file"),
    ("model.json", b'{"format": 1, "scores": {}}', "is missing, damaged"),
]


@pytest.mark.parametrize("name, content, message", DAMAGES)
def test_damaged_files_are_refused(name: str, content: bytes | None, message: str, finished_copy: RunFolder) -> None:
    file = finished_copy.path / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert message in evaluate(finished_copy, status=2).stderr


def test_weights_with_another_checksum_than_recorded_are_refused(finished_copy: RunFolder) -> None:
    file = finished_copy.path / "model.json"
    write_json(file, read_json(file) | {"sha256": "0"})
    assert "checksum" in evaluate(finished_copy, status=2).stderr


def test_a_custom_network_class_is_named(finished_copy: RunFolder) -> None:
    folder = finished_copy
    facts = read_model_facts(folder)
    for changes, message in (
        (
            {"class": "Mine", "arguments": None},
            "the network Mine is not in common/models/networks.py; to evaluate or export it, add",
        ),
        ({"class": None, "arguments": None}, "the network of this run is not in"),
        ({"arguments": None}, f"lacks the constructor arguments of {facts['class']}; add them"),
    ):
        write_json(folder.path / "model.json", facts | changes)
        completed = in_process_calls.call_verb("export", "--format=torch.export", "--", str(folder.path), status=2)
        assert message in completed.stderr
        assert completed.stderr.count("\n") == 1, completed.stderr
    assert message in evaluate(folder, status=2).stderr
    completed = in_process_calls.call_verb("export", "--", str(folder.path))
    assert str(folder.path / "model.safetensors") in completed.stdout


def test_an_export_to_a_read_only_disk_names_the_disk(finished_copy: RunFolder) -> None:
    command = ("export", "--format=torch.export", "--", str(finished_copy.path))
    with mount_read_only(finished_copy.path):
        completed = in_process_calls.call_verb(*command, status=2)
    assert "model.pt2: the disk is read-only" in completed.stderr
    assert not (finished_copy.path / "model.pt2").exists()


def test_an_export_of_an_extended_run_that_stopped_names_the_step_of_the_model(finished_copy: RunFolder) -> None:
    command = ("export", "--", str(finished_copy.path))
    assert in_process_calls.call_verb(*command).stderr == ""
    result = read_json(finished_copy.path / "result.json")
    write_json(finished_copy.path / "result.json", result | {"state": "preempted"})
    step = read_model_facts(finished_copy)["step"]
    assert f"model of its earlier end, after step {step}" in in_process_calls.call_verb(*command).stderr


def test_a_renamed_run_folder_is_refused_with_the_form_of_its_name(finished_copy: RunFolder) -> None:
    renamed = finished_copy.path.rename(finished_copy.path.with_name("best"))
    for verb in ("evaluate", "export", "sample", "rerun"):
        error = in_process_calls.call_verb(verb, "--", str(renamed), status=2).stderr
        assert f"error: {renamed} was renamed, so its experiment is unknown; restore its name, <exp" in error
    error = in_process_calls.call_verb("exp", f"--resume={renamed}", status=2).stderr
    assert "was renamed" in error


def test_a_run_that_did_not_finish_has_no_model(finished_copy: RunFolder) -> None:
    path = finished_copy.path
    for name in ("model.safetensors", "model.json", "result.json"):
        (path / name).unlink()
    assert "has no model.safetensors yet: the run has not finished" in evaluate(finished_copy, status=2).stderr
    write_json(path / "result.json", {"format": 2, "state": "failed", "exit_status": 1, "reason": "a bug"})
    remedy = f"find the cause with make doctor RUN={path}, then resume with make exp RESUME={path}"
    assert f"the run failed; {remedy}" in evaluate(finished_copy, status=2).stderr


def test_a_model_is_evaluated_with_the_settings_of_the_newest_attempt(finished_copy: RunFolder) -> None:
    folder = finished_copy
    changes = folder.path / "attempts/0001/changed.json"
    write_json(changes, {"data.test_limit": ["333", "100"]})
    completed = evaluate(folder)
    assert " of 100 " in completed.stdout
    assert "not compared" in completed.stdout
    changes.write_text('{"data.test_limit": 3}')
    assert "changed.json is damaged, so the settings of its attempt are unknown" in evaluate(folder, status=2).stderr
    assert "changed.json is damaged" in in_process_calls.call_verb("rerun", "--", str(folder.path), status=2).stderr
    assert "changed.json is damaged" in resume_run(REPLICATED_ENTRY, folder, "steps=50", status=2).stderr


def test_the_scores_of_another_device_are_not_compared(finished_copy: RunFolder) -> None:
    folder = finished_copy
    facts = read_model_facts(folder)
    assert facts["device"] == "cpu"
    facts["scores"]["test_loss"] *= 1.001
    write_json(folder.path / "model.json", facts)
    evaluate(folder, status=trained_model.EXIT_DIFFERENT)
    write_json(folder.path / "model.json", facts | {"device": "cuda"})
    completed = evaluate(folder)
    assert "the run was evaluated on cuda, which rounds differently" in completed.stdout


def read_losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in folder.read_metrics() if "loss" in row]


def test_a_finished_run_needs_more_steps_to_be_extended(finished_copy: RunFolder) -> None:
    folder = finished_copy
    resume_command = ("exp", f"--resume={folder.path}", "--launch=local")
    for completed in (resume_run(REPLICATED_ENTRY, folder), in_process_calls.call_verb(*resume_command)):
        assert f'make exp RESUME={folder.path} ARGS="steps=80"' in completed.stdout
    completed = resume_run(REPLICATED_ENTRY, folder, "steps=40")
    assert "is finished" in completed.stdout

    message = f"{folder.path.name} is finished: optim.lr 0.02 -> 5.0 has no effect; increase steps"
    assert message in resume_run(REPLICATED_ENTRY, folder, "optim.lr=5", status=2).stderr
    assert message in in_process_calls.call_verb(*resume_command, "--args=optim.lr=5", status=2).stderr
    with open(folder.path / "config.yaml") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # like another process that runs it
        completed = resume_run(REPLICATED_ENTRY, folder, "steps=50", status=2)
    assert "already running or being started on this machine; wait for it" in completed.stderr
    assert len(folder.list_attempts()) == 1


def test_a_finished_run_is_extended(finished_copy: RunFolder, tmp_path: Path) -> None:
    folder = finished_copy
    losses_before = read_losses(folder)
    completed = resume_run(REPLICATED_ENTRY, folder, "steps=50")
    assert "extending the run after step 40; the learning rate schedule now covers 50 steps" in completed.stdout
    assert (folder.path / "model.safetensors").stat().st_mode & 0o777 == folder.path.stat().st_mode & 0o666
    assert read_json(folder.path / "attempts/0002/heartbeat-1.json")["step"] == 50
    first_result = read_json(folder.path / "attempts/0001/result.json")
    assert first_result["state"] == "finished"
    assert first_result["scores"]["test_samples"] == 333
    losses = read_losses(folder)
    assert len(losses) == 50
    assert losses[:40] == losses_before
    assert [row["global_step"] for row in folder.read_metrics() if "test_loss" in row] == [40, 50]
    assert read_model_facts(folder)["step"] == 50
    evaluate(folder)
    completed = resume_run(REPLICATED_ENTRY, folder)
    assert 'ARGS="steps=100"' in completed.stdout, "twice the new number of steps"

    message = "was resumed with different settings (steps 40 -> 50)"
    assert message in in_process_calls.call_verb("rerun", "--", str(folder.path), status=2).stderr
    arguments = ("--config", str(folder.path / "config.yaml"))
    repeated = run_experiment(REPLICATED_ENTRY.name, *arguments, runs=tmp_path / "again", status=2)
    assert "different settings (steps 40 -> 50), so a single run cannot repeat it" in repeated.stderr
    assert not (tmp_path / "again").exists()

    for checkpoint in storage.list_resumable_checkpoints(folder):
        shutil.rmtree(checkpoint.path)
    assert (
        "the checkpoint of its last step (50) is missing"
        in resume_run(REPLICATED_ENTRY, folder, "steps=60", status=2).stderr
    )
    completed = resume_run(REPLICATED_ENTRY, folder)
    assert "is finished" in completed.stdout
    assert "train on" not in completed.stdout
