"""The commands of the pages, and executing each of them on something small."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.benchmarks import tables
from tests.benchmarks.__main__ import all_parts
from tests.harness import making, warm
from tests.harness.made_runs import Made
from tests.harness.processes import applicable, environment
from tests.harness.registry import BY_NAME, EXPERIMENTS
from tests.harness.warm import ROOT

PAGES = tables.list_pages()
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
    "make new-experiment NAME=my_mlp": "tests/commands/test_new_experiment.py",
    "make exp NAME=ddp_multinode ARGS=data.name=shapes.py:load": "tests/experiments/test_own_data.py",
    "make check-optimizer FILE=lion.py:Lion": "tests/parity/test_optimizers.py",
    "make exp NAME=ddp_multinode 'ARGS=optim.name=lion.py:Lion optim.lr=0.001 optim.decay=halving.py:halve'": (
        "tests/recovery/test_own_optimizer.py"
    ),
    "make exp NAME=my_mlp": "tests/commands/test_new_experiment.py",
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
    "make cluster-up NODES=2": "tests/cluster/test_cluster.py",
    "make cluster-status": "tests/cluster/test_cluster.py",
    "make cluster-down": "tests/cluster/test_cluster.py",
}
for entry in EXPERIMENTS:
    ELSEWHERE.update(entry.page_commands)


def list_commands(*pages: Path) -> list[str]:
    """All lines of the pages' shell blocks, without comments."""
    blocks = [block for page in pages for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)]
    lines = {shlex.join(shlex.split(line, comments=True)) for block in blocks for line in block.splitlines()}
    return sorted(lines - {""})


README = list_commands(ROOT / "README.md")
OTHERS = [command for command in list_commands(*PAGES) if command not in README]


def make_runs(folder: Path) -> Path:
    """Runs for the commands that are about some, in the folder of which they are runs/."""
    for number, name in enumerate(("mnist_pipeline", "ddp_multinode") * 2):
        Made(name, number, 60).write(folder / "runs")
    return folder


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


def check_command(command: str, cache: Path, folder: Path, place: Path, runs: Path) -> None:
    """Execute a command, or find it where else it is executed."""
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
        settings = ["data.name=digits", f"data.cache={cache}", f"runs={folder}", "steps=20", "data.test_limit=100"]
        settings.append("launch.threads=1")  # another worker has the other core
        more = []
        if words[1].startswith("experiments/"):
            name = Path(words[1]).stem
            more = [*applicable(name, settings), *BY_NAME[name].page_settings]
        script = [str(ROOT / words[1])] if more else words[1:2]
        done = warm.execute([sys.executable, *script, *words[2:], *more], env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout
