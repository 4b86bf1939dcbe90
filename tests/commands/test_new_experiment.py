"""make new-experiment: what it writes trains, is tested, and can be changed as CONTRIBUTING.md says; bad names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.launch import new_experiment
from tests.harness import inside, warm
from tests.harness.making import copy_checkout
from tests.harness.processes import environment
from tests.harness.warm import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
OWN_NAME = "example_of_the_page"  # a reader of the page may have made its my_mlp in this checkout
LINT = (("check",), ("format", "--check"))


def execute(place: Path, *words: str, given: str | None = None) -> str:
    """What a command in a folder says; it must succeed."""
    env = environment(PYTHONPATH=str(place), PYTHONDONTWRITEBYTECODE="1")  # new files are those of the command
    done = subprocess.run(words, cwd=place, env=env, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_experiment_changed_as_the_contributing_page_says_trains(tmp_path: Path, cache: Path) -> None:
    place = copy_checkout(tmp_path)
    before = {path for path in place.rglob("*") if path.is_file()}
    said = execute(place, "make", "new-experiment", f"NAME={OWN_NAME}")
    written = {path for path in place.rglob("*") if path.is_file()} - before
    assert len(written) == 4 and all(str(path.relative_to(place)) in said for path in written)
    assert f"[{OWN_NAME}](experiments/{OWN_NAME}.py)" in (place / "README.md").read_text()
    (change,) = re.findall(r"```diff\n(.*?)```", PAGE.replace("my_mlp", OWN_NAME), re.DOTALL)
    for step in (lambda: None, lambda: execute(place, "git", "apply", "-", given=change)):
        step()
        for lint in LINT:
            execute(place, sys.executable, "-m", "ruff", *lint, "--no-cache", "experiments", "configs")
    file = place / "experiments" / f"{OWN_NAME}.py"
    own = "class MyMLP(torch.nn.Sequential):\n    pass\n\n\ndef main("
    text = file.read_text().replace("def main(", own).replace("network = SimpleNN(", "network = MyMLP(SimpleNN(")
    file.write_text(text.replace("classes=run.classes)", "classes=run.classes))"))
    script = [sys.executable, str(file), "data.name=digits", f"data.cache={cache}"]
    words = [*script, "data.test_limit=50", "steps=5", "noise=10"]
    done = warm.execute(words, cwd=place, root=place, env=environment(PYTHONPATH=str(place)))
    assert done.returncode == 0 and "  noise          10\n" in done.stdout, done.stdout + done.stderr
    (loss,) = re.findall(r"test loss +([\d.]+)", done.stdout)
    assert float(loss) > 5, "the noise reaches the weights"
    (folder,) = (place / "runs").iterdir()
    facts = json.loads((folder / "model.json").read_text())
    assert (facts["class"], facts["arguments"]) == ("MyMLP", None), "a network that the script defines"
    told = inside.run_verb("export", "--format=torch.export", "--", str(folder))
    assert "the network MyMLP is not in common/models/networks.py" in told.stderr


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with nothing but an experiment and the README, where the verb writes."""
    for name in ("experiments/figures", "configs/cluster", "tests/benchmarks"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("experiments/taken.py", "configs/shared.py", "tests/benchmarks/tools.py", "README.md"):
        (tmp_path / name).write_text("# it was here before\n")
    monkeypatch.setattr(new_experiment, "ROOT", tmp_path)
    return tmp_path


def write_in(root: Path, name: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Write a new experiment; what the command said, and which files differ from before, with their texts."""
    before = {path: path.read_text() for path in root.rglob("*") if path.is_file()}
    done = inside.run_verb("new-experiment", "--", name)
    after = {path: path.read_text() for path in root.rglob("*") if path.is_file()}
    assert before.keys() <= after.keys()
    return done, {str(path.relative_to(root)): text for path, text in after.items() if text != before.get(path)}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "NAME is missing; run, for example, make new-experiment NAME="),
        *((name, "is invalid; use") for name in ("../x", "x; id", "X", "9x", "exp-x", "x" * 65, "\udcff", "lambda")),
        *((name, "would hide an") for name in ("json", "winreg", "torch", "numpy", "wandb", "common", "tests")),
        *((name, "already exists") for name in ("taken", "shared", "figures", "cluster", "tools")),
    ],
)
def test_a_name_that_cannot_be_is_refused(root: Path, name: str, told: str) -> None:
    done, changed = write_in(root, name)
    assert done.returncode == 2 and not changed and not done.stdout
    assert told in done.stderr and done.stderr.count("\n") == 1


def test_a_readme_without_a_table_stays_as_it_is(root: Path) -> None:
    done, changed = write_in(root, "my_mlp")
    assert done.returncode == 0 and sorted(changed) == sorted(f"{f}/my_mlp.{e}" for f, e in FILES)
    assert "README.md" not in done.stdout


FILES = (("experiments", "py"), ("experiments", "md"), ("configs", "py"), ("configs", "yaml"))


@pytest.mark.parametrize(("folder", "ending"), FILES)
def test_nothing_is_written_where_one_file_cannot_be(root: Path, folder: str, ending: str) -> None:
    (root / folder / f"my_mlp.{ending}").symlink_to(root / "nowhere")  # it is seen only when it is written
    done, changed = write_in(root, "my_mlp")
    assert done.returncode == 2 and f"my_mlp.{ending} already exists" in done.stderr and not changed
    (root / folder).rename(root / "moved")
    done, changed = write_in(root, "my_mlp")
    assert done.returncode == 2 and "the folder does not exist" in done.stderr and not changed
