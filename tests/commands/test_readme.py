"""The README is true: its commands run, its links lead somewhere, its sample output looks like the real one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.made_runs import Made
from tests.harness.processes import ROOT, environment, run

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = sorted(
    {shlex.join(shlex.split(line, comments=True)) for block in BLOCKS for line in block.splitlines()} - {""}
)
ON_RUNS = {"compare", "sync", "dashboard", "prune-runs"}  # these need runs, and get some of their own
BY_CI = {"make lint", "make test", "make test-slurm"}  # .ci/run calls them as they are
ELSEWHERE = {
    "make requirements": "needs the package index",
    "make bench": "takes minutes",
    "make leet": "tests/commands/test_upload.py",
    "make tour": "tests/complete/test_tour.py",
    "make exp 'RESUME=<id>'": "tests/recovery/test_resume.py",
    "make exp 'RESUME=<id>' ARGS=stages=1": "tests/recovery/test_resume.py",
    "make sweep GRID=configs/sweeps/mnist_pipeline_rates.yaml": "takes a minute; tests/commands/test_sweep.py",
    "make sweep GRID=configs/sweeps/mnist_pipeline_rates.yaml FAILED=1": "tests/commands/test_sweep.py",
    "make doctor 'RUN=<id>'": "tests/commands/test_doctor.py",
    "make rerun 'RUN=<id>'": "tests/commands/test_rerun.py",
    "make rerun 'RUN=<id>' ARGS=seed=1": "tests/commands/test_rerun.py",
    "make cluster-up NODES=2": "tests/cluster/test_cluster.py",
    "make cluster-status": "tests/cluster/test_cluster.py",
    "make cluster-down": "tests/cluster/test_cluster.py",
}


def quick(words: list[str], cache: Path, runs: Path) -> list[str]:
    """A command with settings that make it short, kept out of the checkout."""
    settings = ["data.name=digits", f"data.cache={cache}", f"runs={runs}", "steps=20", "data.test_limit=100"]
    if words[1] in ("sweep", "status"):
        return words
    if words[0] == "python":
        return [sys.executable, *words[1:], *(settings if words[1].startswith("experiments/") else [])]
    args = next((w.removeprefix("ARGS=") for w in words if w.startswith("ARGS=")), "")
    kept = [w for w in words if not w.startswith("ARGS=")]
    return [*kept, f"ARGS={shlex.join(settings)} {args}"]


def on_runs(words: list[str], place: Path) -> None:
    """A command about runs, where there are some."""
    folders = [Made(name, i, 60).write(place / "runs") for i in (0, 2) for name in ("mnist_pipeline", "ddp_multinode")]
    ids = iter(folder.path.name for folder in folders)
    words = [re.sub("<id>", lambda _: next(ids), word) for word in words]
    done = subprocess.run(words, cwd=place, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(command: str, cache: Path, tmp_path: Path, place: Path) -> None:
    words = shlex.split(command)
    target = words[1] if words[0] == "make" else ""
    if target in ON_RUNS:
        on_runs(words, place)
        return
    if command in ELSEWHERE or (target == "test" and len(words) > 2):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if command in BY_CI:
        assert command in (ROOT / ".ci" / "run").read_text().splitlines()
        return
    if target and not (ROOT / ".venv" / ".ready").exists():
        pytest.skip("no .venv here: make would set one up")
    done = subprocess.run(
        quick(words, cache, tmp_path),
        cwd=ROOT,
        env=environment() | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    assert not [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]


def test_sample_output_has_the_lines_of_a_real_run(cache: Path, tmp_path: Path) -> None:
    done = run("mnist_pipeline", "data.name=digits", f"data.cache={cache}", "steps=20", runs=tmp_path)
    sample = re.search(r"```text\n(mnist_pipeline: .*?)```", TEXT, re.DOTALL)
    assert sample

    def labels(text: str) -> list[str]:
        return re.findall(r"^  ([a-z][a-z ]*?)  ", text, re.MULTILINE)

    assert labels(sample.group(1)) == labels(done.out)
    assert len(labels(done.out)) > 8


def test_every_experiment_and_pitfall_is_told() -> None:
    for script in (ROOT / "experiments").glob("*.py"):
        assert f"](experiments/{script.name})" in TEXT
        tour = TEXT.partition("## A tour\n")[2].partition("\n## ")[0]
        assert re.search(rf"^\| {script.stem} \|[^|]+\?[^|]* \|[^|]{{20,}}\|$", tour, re.MULTILINE)
