"""The pages are true: their commands run, their links lead somewhere, the sample output looks like the real one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.benchmarks import tables
from tests.benchmarks.__main__ import all_parts
from tests.harness import making, warm
from tests.harness.made_runs import Made
from tests.harness.processes import environment, run
from tests.harness.warm import ROOT

PAGES = tables.pages()
TEXT = (ROOT / "README.md").read_text()
BLOCKS = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)]
COMMANDS = sorted(
    {shlex.join(shlex.split(line, comments=True)) for block in BLOCKS for line in block.splitlines()} - {""}
)
REAL = {"make compare", "make status"}  # all the way through make and an interpreter
BY_CI = {
    "make exp NAME=mnist_pipeline",
    "make lint",
    "make test-all",
    "make test-slurm",
}  # .ci/run calls them as they are
ELSEWHERE = {
    "make requirements": "needs the package index",
    "make tables": "tests/commands/test_numbers.py",
    "make test": "a part of make test-all",
    "make leet": "tests/complete/test_wandb_host.py",
    "make dashboard PROJECT=distributed-experiments DRY_RUN=1": "tests/commands/test_upload.py",
    "make tour": "tests/complete/test_tour.py",
    "make exp NAME=mnist_pipeline NODES=2": "tests/commands/test_make.py",
    "make exp NAME=mnist_pipeline NODES=2 FOLLOW=1": "tests/commands/test_make.py",
    "make exp 'RESUME=<id>'": "tests/recovery/test_resume.py",
    "make exp 'RESUME=<id>' ARGS=stages=1": "tests/recovery/test_resume.py",
    "make exp 'RESUME=<id>' ARGS=epochs=22": "tests/experiments/test_trained_model.py",
    "make evaluate 'RUN=<id>'": "tests/experiments/test_trained_model.py",
    "make evaluate 'RUN=<id>' ARGS=data.test_limit=1000": "tests/experiments/test_trained_model.py",
    "make export 'RUN=<id>' FORMAT=torch.export": "tests/complete/test_exported_models.py",
    "make sweep GRID=configs/sweeps/mnist_pipeline_rates.yaml": "tests/commands/test_sweep.py",
    "make sweep GRID=configs/sweeps/mnist_pipeline_rates.yaml FAILED=1": "tests/commands/test_sweep.py",
    "make doctor NODES=2": "tests/commands/test_doctor.py",
    "make doctor NODES=2 JSON=1": "tests/commands/test_doctor.py",
    "make doctor 'RUN=<id>'": "tests/commands/test_doctor.py",
    "make rerun 'RUN=<id>'": "tests/commands/test_rerun.py",
    "make rerun 'RUN=<id>' ARGS=seed=1": "tests/complete/test_rerun_through_make.py",
    "make exp NAME=resnet_modelparallel ARGS=sweep=true": "tests/experiments/test_modelparallel.py",
    "make exp NAME=resnet_dataparallel ARGS=sweep=true": "tests/experiments/test_resnet_dataparallel.py",
    "make exp NAME=amp_accum ARGS=sweep=true": "tests/experiments/test_amp.py",
    "make exp NAME=sparse_prune ARGS=sweep=true": "tests/complete/test_sweep_of_criteria.py",
    "make cluster-up NODES=2": "tests/cluster/test_cluster.py",
    "make cluster-status": "tests/cluster/test_cluster.py",
    "make cluster-down": "tests/cluster/test_cluster.py",
}
SMALLER = {  # of the commands that train: the smallest of these settings that leave the command's own
    "resnet_modelparallel": ("width=8", "batch=16", "plot=false"),
    "resnet_dataparallel": ("batch=16", "steps=3", "compare=false"),
    "sparse_prune": ("every=5", "export=false"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs for the commands that are about some, in the folder of which they are runs/."""
    place = tmp_path_factory.mktemp("readme")
    for number, name in enumerate(("mnist_pipeline", "ddp_multinode") * 2):
        Made(name, number, 60).write(place / "runs")
    return place


def by_make(words: list[str], place: Path, runs: Path) -> subprocess.CompletedProcess[str]:
    """Let make hand over the words to the command, and call that where there are runs and the project's files."""
    (place / "runs").symlink_to(runs / "runs")
    (place / "configs").symlink_to(ROOT / "configs")
    ids = iter(sorted(path.name for path in (runs / "runs").glob("*-*")))
    words = [re.sub("<id>", lambda _: next(ids), word) for word in words]
    if shlex.join(words) in REAL:
        return subprocess.run(
            words, cwd=place, env=environment(), capture_output=True, text=True, timeout=120, check=False
        )
    return making.call(place, *words[1:])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(command: str, cache: Path, tmp_path: Path, place: Path, runs: Path) -> None:
    words = shlex.split(command)
    target = words[1] if words[0] == "make" else ""
    if command in BY_CI:
        lines = (ROOT / ".ci" / "run").read_text().splitlines()
        assert command in [line.removeprefix("timed ").removeprefix("tested ") for line in lines]
        return
    if target == "bench":  # tests/complete/test_benchmarks.py runs two
        assert any(words[2] in (f"NAME={part.name}", f"NAME={part.name.partition('/')[0]}") for part in all_parts())
        return
    if command in ELSEWHERE or (target == "test" and len(words) > 2):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        told = ELSEWHERE.get(command, words[-1].removeprefix("TESTS="))
        assert not told.startswith("tests/") or (ROOT / told).exists()
        return
    if target:
        done = by_make(words, place, runs)
    else:
        settings = ["data.name=digits", f"data.cache={cache}", f"runs={tmp_path}", "steps=20", "data.test_limit=100"]
        more = [*settings, *SMALLER.get(Path(words[1]).stem, ())] if words[1].startswith("experiments/") else []
        script = [str(ROOT / words[1])] if more else words[1:2]
        done = warm.execute([sys.executable, *script, *words[2:], *more], env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert link.startswith("http") or target.exists(), link
        assert not anchor or anchor in slugs(target), link


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 200


def test_sample_output_has_the_lines_of_a_real_run(cache: Path, tmp_path: Path) -> None:
    done = run("mnist_pipeline", "data.name=digits", f"data.cache={cache}", "steps=20", runs=tmp_path)
    sample = re.search(r"```text\n(mnist_pipeline: .*?)```", TEXT, re.DOTALL)
    assert sample

    def labels(text: str) -> list[str]:
        return re.findall(r"^  ([a-z][a-z ]*?)  ", text, re.MULTILINE)

    assert labels(sample.group(1)) == labels(done.out)
    assert len(labels(done.out)) > 8


@pytest.mark.parametrize("script", sorted((ROOT / "experiments").glob("*.py")), ids=lambda script: script.stem)
def test_every_experiment_has_its_page_and_its_line(script: Path) -> None:
    assert re.search(
        rf"^\| \[{script.stem}\]\(experiments/{script.name}\) \|.*\]\(experiments/{script.stem}.md\) \|$", TEXT, re.M
    )
    page = script.with_suffix(".md").read_text()
    assert page.startswith(f"# {script.stem}\n\n**Question.** ")
    heads = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert heads == ["Method", "Commands", "Measured", "What surprises", "Exercises"]
    assert "](https://arxiv.org/abs/" in page and f"({script.name})" in page
    assert any(command.startswith(f"make bench NAME={script.stem}") for command in COMMANDS)


def test_ci_and_hooks_call_what_the_pages_name() -> None:
    assert "run: .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [shlex.split(hook["entry"]) for repo in hooks for hook in repo["hooks"]]
    assert {repo["repo"] for repo in hooks} == {"local"}  # no network
    lint = " ".join(re.findall(r"-m (ruff \w+|mypy)", (ROOT / "Makefile").read_text()))
    assert entries and all(entry[0] == ".venv/bin/python" and entry[2] in lint for entry in entries)
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version and yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version[1]
