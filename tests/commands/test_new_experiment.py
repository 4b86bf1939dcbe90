"""make new-experiment: its files train, are tested, and can be changed as in CONTRIBUTING.md; invalid names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.runs.folder import read_json
from slurm.launch import new_experiment
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.exit_status import Completed, check_status
from tests.harness.commands.make_targets import copy_checkout
from tests.harness.commands.processes import make_environment
from tests.harness.repository import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
OWN_NAME = "example_of_the_page"  # a reader of the page may have made its my_mlp in this checkout


def execute(place: Path, *command: str, standard_input: str | None = None) -> str:
    """Return the output of a command in a folder; the command must succeed."""
    env = make_environment(PYTHONPATH=str(place), PYTHONDONTWRITEBYTECODE="1")  # new files are those of the command
    completed = subprocess.run(
        command, cwd=place, env=env, input=standard_input, capture_output=True, text=True, check=False
    )
    check_status(completed, 0)
    return completed.stdout


def check_with_ruff(place: Path) -> None:
    for options in (["check"], ["format", "--check"]):
        execute(place, sys.executable, "-m", "ruff", *options, "--no-cache", "experiments", "configs")


def test_a_new_experiment_changed_as_in_the_contributing_page_trains(tmp_path: Path, cache: Path) -> None:
    place = copy_checkout(tmp_path)
    before = {path for path in place.rglob("*") if path.is_file()}
    output = execute(place, "make", "new-experiment", f"NAME={OWN_NAME}")
    written = {path for path in place.rglob("*") if path.is_file()} - before
    assert len(written) == 4
    for path in written:
        assert str(path.relative_to(place)) in output
    assert f"[{OWN_NAME}](experiments/{OWN_NAME}.py)" in (place / "README.md").read_text()
    (change,) = re.findall(r"```diff\n(.*?)```", PAGE.replace("my_mlp", OWN_NAME), re.DOTALL)
    check_with_ruff(place)
    execute(place, "git", "apply", "-", standard_input=change)
    check_with_ruff(place)
    file = place / "experiments" / f"{OWN_NAME}.py"
    definition = "class MyMLP(torch.nn.Sequential):\n    pass\n\n\ndef main("
    text = file.read_text().replace("def main(", definition).replace("network = SimpleNN(", "network = MyMLP(SimpleNN(")
    file.write_text(text.replace("classes=run.outputs)", "classes=run.outputs))"))
    script = [sys.executable, str(file), "data.name=digits", f"data.cache={cache}"]
    command = [*script, "data.test_limit=50", "steps=5", "noise=10"]
    completed = execution.execute_command(
        command, cwd=place, root=place, env=make_environment(PYTHONPATH=str(place)), status=0
    )
    assert "  noise          10\n" in completed.stdout, completed.stdout + completed.stderr
    (loss,) = re.findall(r"test loss +([\d.]+)", completed.stdout)
    assert float(loss) > 5, "the noise changes the weights"
    (folder,) = (place / "runs").iterdir()
    facts = read_json(folder / "model.json")
    assert (facts["class"], facts["arguments"]) == ("MyMLP", None), "a network that the script defines"
    export = in_process_calls.call_verb("export", "--format=torch.export", "--", str(folder), status=2)
    assert "the network MyMLP is not in common/models/networks.py" in export.stderr


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that contains only an experiment and a README, where the command writes."""
    for name in ("experiments/figures", "configs/cluster", "tests/benchmarks"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("experiments/taken.py", "configs/shared.py", "tests/benchmarks/tools.py", "README.md"):
        (tmp_path / name).write_text("# it was here before\n")
    monkeypatch.setattr(new_experiment, "ROOT", tmp_path)
    return tmp_path


def write_in(root: Path, name: str, status: int = 0) -> tuple[Completed, dict[str, str]]:
    """Write a new experiment; return the completed command, and the changed files with their texts."""
    before = {path: path.read_text() for path in root.rglob("*") if path.is_file()}
    completed = in_process_calls.call_verb("new-experiment", "--", name, status=status)
    after = {path: path.read_text() for path in root.rglob("*") if path.is_file()}
    assert before.keys() <= after.keys()
    return completed, {str(path.relative_to(root)): text for path, text in after.items() if text != before.get(path)}


INVALID_NAMES = [
    ("", "NAME is missing; run, for example, make new-experiment NAME="),
    *((name, "is invalid; use") for name in ("../x", "x; id", "X", "9x", "exp-x", "x" * 65, "\udcff", "lambda")),
    *((name, "would hide an") for name in ("json", "winreg", "torch", "numpy", "wandb", "common", "tests")),
    *((name, "already exists") for name in ("taken", "shared", "figures", "cluster", "tools")),
]


@pytest.mark.parametrize("name, message", INVALID_NAMES)
def test_an_invalid_name_is_refused(root: Path, name: str, message: str) -> None:
    completed, changed = write_in(root, name, status=2)
    assert not changed
    assert not completed.stdout
    assert message in completed.stderr
    assert completed.stderr.count("\n") == 1


def test_a_readme_without_a_table_is_not_changed(root: Path) -> None:
    completed, changed = write_in(root, "my_mlp")
    assert sorted(changed) == sorted(f"{f}/my_mlp.{e}" for f, e in FILES)
    assert "README.md" not in completed.stdout


FILES = (("experiments", "py"), ("experiments", "md"), ("configs", "py"), ("configs", "yaml"))


@pytest.mark.parametrize("folder, suffix", FILES)
def test_nothing_is_written_if_one_file_cannot_be_written(root: Path, folder: str, suffix: str) -> None:
    dangling_link = root / folder / f"my_mlp.{suffix}"  # is found only when the file is written
    dangling_link.symlink_to(root / "nowhere")
    completed, changed = write_in(root, "my_mlp", status=2)
    assert f"my_mlp.{suffix} already exists" in completed.stderr
    assert not changed
    (root / folder).rename(root / "moved")
    completed, changed = write_in(root, "my_mlp", status=2)
    assert "the folder does not exist" in completed.stderr
    assert not changed
