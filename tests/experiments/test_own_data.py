"""A run with a custom network, loss and data set is trained, evaluated, and resumed after its files have changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.runs.folder import read_json
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import run_experiment
from tests.harness.custom_code.examples import write_example
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.runs.resuming import resume_run


@pytest.mark.slow
def test_a_run_learns_and_stores_the_examples_of_the_page(tmp_path: Path) -> None:
    file = write_example(tmp_path)
    network_file = write_example(tmp_path, "residual.py")
    loss_file = write_example(tmp_path, "focal.py")
    settings = (f"data.name={file}:load", f"data.cache={tmp_path / 'sets'}", "steps=60", "log.progress=none")
    custom_training = (f"model={network_file}:ResidualNet", f"loss={loss_file}:focal_loss")
    completed = run_experiment(
        REPLICATED_ENTRY.name,
        *settings,
        *REPLICATED_ENTRY.smallest_settings,
        *custom_training,
        runs=tmp_path / "runs",
    )
    folder = completed.folder
    assert completed.result["data"] == f"{file}:load"
    assert completed.result["test_accuracy"] > 0.9
    facts = read_json(folder.path / "model.json")
    assert facts["class_names"] == ["0", "1", "2"]
    assert facts["class"] == "ResidualNet"
    assert facts["arguments"] == {"shape": [12, 12], "outputs": 3}
    assert facts["shape"] == [12, 12]
    assert completed.result["test_samples"] == 500
    assert (folder.path / "code/own/data.py").read_text() == file.read_text()
    for changed_file in (file, network_file, loss_file):
        changed_file.write_text("another file by now")
    evaluation = in_process_calls.call_verb("evaluate", "--", str(folder.path))
    assert "recorded by the run: " in evaluation.stdout, evaluation.stdout + evaluation.stderr
    shutil.rmtree(tmp_path / "sets")
    resumed = resume_run(REPLICATED_ENTRY, folder, "steps=70")
    assert "extending the run after step 60" in resumed.stdout, resumed.stderr
    assert "different data" not in resumed.stderr
    assert len(folder.read_metrics()) == 72
    evaluation = in_process_calls.call_verb(
        "evaluate", f"--args=data.name={file}:load", "--", str(folder.path), status=2
    )
    assert f"{file}:1: SyntaxError" in evaluation.stderr, "an explicit setting uses the named file"
