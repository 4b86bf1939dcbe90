"""`make export`: programs without this project compute the same outputs from the exported files."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.models import exporting, model_file
from common.runs.folder import RunFolder
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.custom_code.examples import write_example
from tests.harness.environment.randomness import draw_cases
from tests.harness.environment.shared_results import GetRun
from tests.harness.experiments.entry import Entry
from tests.harness.experiments.exported_programs import run_exported_program
from tests.harness.experiments.registry import ENTRIES, REPLICATED_ENTRY, STAGED_ENTRY
from tests.harness.repository import ROOT

NETWORKS = [entry for entry in ENTRIES if entry.tests_export]
EVALUATED: list[tuple[str, tuple[str, ...]]] = []
for experiment in ENTRIES:
    EVALUATED += [(experiment.name, settings) for settings in experiment.evaluation_variants]


def copy(folder: RunFolder, destination: Path) -> RunFolder:
    shutil.copytree(folder.path, destination / folder.path.name)
    return RunFolder(destination / folder.path.name)


def export(folder: RunFolder, *arguments: str, status: int = 0) -> Completed:
    return in_process_calls.call_verb("export", *arguments, "--", str(folder.path), status=status)


@pytest.mark.parametrize("entry", NETWORKS, ids=lambda entry: entry.name)
def test_the_torch_export_file_computes_the_same_outputs(
    entry: Entry, finished: GetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One experiment is checked in a process without this project, the others in this process."""
    if entry != STAGED_ENTRY:
        monkeypatch.setattr(exporting, "run_exported_program_in_new_process", run_exported_program)
    folder = copy(finished(entry).folder, tmp_path)
    completed = export(folder, "--format=torch.export")
    if entry == STAGED_ENTRY:
        assert "checked: the outputs of the exported model differ" in completed.stdout
    facts, model = model_file.load_model(folder)
    inputs = exporting.draw_inputs(facts, 3)
    assert torch.allclose(run_exported_program(folder.path / "model.pt2", inputs), model(inputs), atol=1e-5)


def read_readme_examples() -> tuple[str, str]:
    """Return the two blocks of Python in README.md: with model.pt2, and the line that loads model.safetensors."""
    page = (ROOT / "README.md").read_text()
    _, _, section = page.partition("\n## Using a trained model\n")
    exported, safetensors = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    return exported, safetensors


def execute_in_run_folder(program: str, folder: RunFolder, python_path: str = "") -> str:
    """Execute a program in the folder of a run, without this project on the path, and return its output."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python_path:
        env["PYTHONPATH"] = python_path
    command = [sys.executable, "-P", "-c", program]
    return execution.execute_command(command, cwd=folder.path, env=env, real_process=True, status=0).stdout


def test_the_example_of_the_readme_uses_a_trained_model(
    finished: GetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "run_exported_program_in_new_process", run_exported_program)
    folder = copy(finished(STAGED_ENTRY).folder, tmp_path)
    export(folder, "--format=torch.export")
    exported, safetensors = read_readme_examples()
    facts = json.loads((folder.path / "model.json").read_text())

    # The same lines classify the test samples of the run as well as the run does.
    data = json.loads((folder.path / "meta.json").read_text())["data"]["path"]
    loaded = f"""
import numpy as np
images = torch.from_numpy(np.load({data + "/test_images.npy"!r})[:333])
labels = np.load({data + "/test_labels.npy"!r})[:333]
"""
    with_data = re.sub(r"^images = .*\n", lambda _: loaded, exported, count=1, flags=re.MULTILINE)
    assert with_data != exported
    with_data += "print((model(inputs).argmax(1).numpy() == labels).mean())\n"
    of_safetensors = re.sub(r"^model = .*\n", lambda _: safetensors, with_data, count=1, flags=re.MULTILINE)
    assert of_safetensors != with_data

    without_project = exported + with_data + "import sys\nassert 'common' not in sys.modules\n"
    for program, python_path in ((without_project, ""), (of_safetensors, "code")):
        *lines, accuracy = execute_in_run_folder(program, folder, python_path).splitlines()
        assert float(accuracy) == pytest.approx(facts["scores"]["test_accuracy"])
        for names in map(ast.literal_eval, lines):
            assert set(names) <= set(facts["class_names"])


def test_the_example_for_float_arrays_uses_a_trained_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "run_exported_program_in_new_process", run_exported_program)
    file = write_example(tmp_path, "waves.py")
    data = (f"data.name={file}:load", f"data.cache={tmp_path / 'sets'}", "loss=mse", "model=mlp")
    completed = run_experiment(REPLICATED_ENTRY.name, *data, "log.progress=none", "steps=5", runs=tmp_path / "runs")
    export(completed.folder, "--format=torch.export")
    example = write_example(tmp_path, "use_model.py").read_text()
    program = f"{example}\nassert inputs.shape == (4, 64)\nassert model(inputs).shape == (4, 1)\n"
    assert "tensor(" in execute_in_run_folder(program, completed.folder)


def test_the_safetensors_file_is_named(finished: GetRun) -> None:
    folder = finished(REPLICATED_ENTRY).folder
    completed = export(folder)
    assert completed.stdout.splitlines() == [str(folder.path / name) for name in ("model.safetensors", "model.json")]


def test_an_unknown_format_is_refused(finished: GetRun) -> None:
    completed = export(finished(REPLICATED_ENTRY).folder, "--format=pickle", status=2)
    assert "use safetensors, torch.export or onnx" in completed.stderr


def test_onnx_is_exported_or_missing_packages_are_named(finished: GetRun, tmp_path: Path) -> None:
    folder = copy(finished(REPLICATED_ENTRY).folder, tmp_path)
    if all(importlib.util.find_spec(name) for name in exporting.ONNX_PACKAGES):
        export(folder, "--format=onnx")
        assert (folder.path / "model.onnx").stat().st_size > 1000
    else:
        completed = export(folder, "--format=onnx", status=2)
        assert "-m pip install onnx onnxscript onnxruntime" in completed.stderr
        assert not list(folder.path.glob("*.onnx*"))
        assert not list(folder.path.glob(".new*"))


@pytest.mark.parametrize("name, settings", draw_cases("evaluated models", EVALUATED, 2))
def test_models_of_every_kind_of_training_are_evaluated(
    name: str, settings: Settings, digits: Settings, tmp_path: Path
) -> None:
    completed = run_experiment(name, *digits, "optim.warmup=0", "steps=8", *settings, runs=tmp_path)
    evaluated = in_process_calls.call_verb("evaluate", "--", str(completed.folder.path))
    assert "recorded by the run: " in evaluated.stdout, evaluated.stdout + evaluated.stderr


def test_a_new_run_starts_with_the_weights_of_another(digits: Settings, tmp_path: Path) -> None:
    name = "resnet_modelparallel"
    small = (*digits, "width=2", "mode=single", "batch=16", "plot=false", "launch.device=cpu")
    first = run_experiment(name, *small, "steps=3", runs=tmp_path / "one")
    path = first.folder.path
    (checkpoint_folder,) = path.glob("attempts/0001/checkpoints/step-*")
    expected = load_file(path / "model.safetensors")
    torch.save(expected, tmp_path / "state.pt")

    unchanged = (*small, "steps=1", "optim.lr=0")  # the weights keep their initial values
    sources = (path, checkpoint_folder, path / "model.safetensors", tmp_path / "state.pt")
    for number, source in enumerate(sources):
        completed = run_experiment(name, *unchanged, f"weights={source}", runs=tmp_path / f"next-{number}")
        state = load_file(completed.folder.path / "model.safetensors")
        for weight in expected:
            if weight.endswith("weight"):
                assert torch.equal(state[weight], expected[weight]), weight
    run_experiment(name, *unchanged, f"weights={path.name}", runs=tmp_path / "one")
    missing = run_experiment(name, *unchanged, "weights=nowhere", runs=tmp_path / "none", status=2)
    assert "weights=nowhere: no such file, checkpoint folder or run" in missing.stderr
