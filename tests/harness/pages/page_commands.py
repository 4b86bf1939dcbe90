"""List the commands of the pages, and execute each of them with small settings."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.benchmarks import tables
from tests.benchmarks.__main__ import all_parts
from tests.harness.commands import execution, make_targets
from tests.harness.commands.processes import make_environment, select_applicable_settings
from tests.harness.experiments.registry import ENTRIES, ENTRY_BY_NAME
from tests.harness.repository import ROOT
from tests.harness.runs.synthetic_runs import SyntheticRun

PAGES = tables.list_pages()
REAL_MAKE_COMMANDS = {"make compare", "make status"}  # executed by make, with a real interpreter
CI_COMMANDS = {
    "make exp NAME=mnist_pipeline",
    "make lint",
    "make test-all",
    "make test-slurm",
}  # lines of .ci/run
COMMANDS_TESTED_ELSEWHERE = {
    "make requirements": "needs the package index",
    "make test-gpu": "needs an NVIDIA GPU",
    "make tables": "tests/commands/test_numbers.py",
    "make test": "a part of make test-all",
    "make leet": "tests/complete/test_wandb_host.py",
    "make dashboard PROJECT=distributed-experiments DRY_RUN=1": "tests/commands/test_upload.py",
    "make tour": "tests/complete/test_tour.py",
    "make new-experiment NAME=my_mlp": "tests/commands/test_new_experiment.py",
    "make exp NAME=ddp_multinode ARGS=data.name=shapes.py:load": "tests/experiments/test_own_data.py",
    "make exp NAME=ddp_multinode ARGS=model=residual.py:ResidualNet": "tests/experiments/test_own_data.py",
    "make exp NAME=ddp_multinode ARGS=loss=focal.py:focal_loss": "tests/experiments/test_own_data.py",
    "make exp NAME=ddp_multinode 'ARGS=data.name=waves.py:load loss=mse model=mlp'": (
        "tests/parity/test_custom_training.py"
    ),
    "make exp NAME=ddp_multinode 'ARGS=data.name=recordings.py:load data.root=recordings model=mlp data.workers=1'": (
        "tests/recovery/test_own_optimizer.py"
    ),
    "make check-optimizer FILE=lion.py:Lion": "tests/parity/test_optimizers.py",
    "make exp NAME=ddp_multinode 'ARGS=optim.name=lion.py:Lion optim.lr=0.001 optim.decay=halving.py:halve'": (
        "tests/recovery/test_own_optimizer.py"
    ),
    "make exp NAME=my_mlp": "tests/commands/test_new_experiment.py",
    "make exp NAME=mnist_pipeline NODES=2": "tests/commands/test_make.py",
    "make exp NAME=mnist_pipeline NODES=2 FOLLOW=1": "tests/commands/test_make.py",
    "make exp 'RESUME=<id>'": "tests/recovery/test_resume.py",
    "make exp 'RESUME=<id>' ARGS=stages=1": "tests/recovery/test_resume.py",
    "make exp 'RESUME=<id>' ARGS=processes_per_node=1": "tests/recovery/test_resharding.py",
    "make exp 'RESUME=<id>' NODES=1": "tests/unit/slurm/scheduling/test_submission.py",
    "make exp 'RESUME=<id>' ARGS=epochs=22": "tests/experiments/test_trained_model.py",
    "make exp NAME=ddp_multinode NODES=2 'ARGS=launch.device=cpu launch.backend=builtin launch.tls=true'": (
        "tests/cluster/test_slurm_jobs.py"
    ),
    "make evaluate 'RUN=<id>'": "tests/experiments/test_trained_model.py",
    "make evaluate 'RUN=<id>' ARGS=data.test_limit=1000": "tests/experiments/test_trained_model.py",
    "make export 'RUN=<id>' FORMAT=torch.export": "tests/complete/test_exported_models.py",
    "make archive 'RUNS=<id> <id>'": "tests/unit/slurm/reports/test_archive.py",
    "make sweep GRID=configs/sweeps/mnist_pipeline_rates.yaml": "tests/commands/test_sweep.py",
    "make sweep GRID=configs/sweeps/mnist_pipeline_rates.yaml FAILED=1": "tests/commands/test_sweep.py",
    "make sweep GRID=configs/sweeps/strategies.py NAME=ddp_multinode RANKS=4": (
        "tests/unit/slurm/launch/test_strategy_sweep.py"
    ),
    "make sweep GRID=configs/sweeps/strategies.py NAME=ddp_multinode RANKS=4 ROUNDS=5": (
        "tests/unit/slurm/launch/test_strategy_sweep.py"
    ),
    "make compare SWEEP=mnist_pipeline_rates GROUP=seed": "tests/commands/test_compare_groups.py",
    "make doctor NODES=2": "tests/commands/test_doctor.py",
    "make doctor NODES=2 JSON=1": "tests/commands/test_doctor.py",
    "make doctor 'RUN=<id>'": "tests/commands/test_doctor.py",
    "make rerun 'RUN=<id>'": "tests/commands/test_rerun.py",
    "make rerun 'RUN=<id>' ARGS=seed=1": "tests/complete/test_rerun_through_make.py",
    "make cluster-up NODES=2": "tests/cluster/test_cluster.py",
    "make cluster-status": "tests/cluster/test_cluster.py",
    "make cluster-down": "tests/cluster/test_cluster.py",
}
TORCHRUN = (
    "torchrun --nnodes=2 --node-rank=0 --nproc-per-node=1 '--master-addr=<host>' --master-port=29500 "
    "experiments/ddp_multinode.py"
)  # the command for two machines without SLURM
COMMANDS_TESTED_ELSEWHERE[TORCHRUN] = "tests/recovery/test_torchrun.py"
for entry in ENTRIES:
    COMMANDS_TESTED_ELSEWHERE.update(entry.page_commands_tested_elsewhere)


def list_page_commands(*pages: Path) -> list[str]:
    """Return the lines of the pages' shell blocks, without comments."""
    commands = set()
    for page in pages:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                commands.add(shlex.join(shlex.split(line, comments=True)))
    return sorted(commands - {""})


README_COMMANDS = list_page_commands(ROOT / "README.md")
OTHER_PAGE_COMMANDS = [command for command in list_page_commands(*PAGES) if command not in README_COMMANDS]


def write_page_runs(folder: Path) -> Path:
    """Write runs into `folder`/runs, for commands about runs."""
    for number, name in enumerate(("mnist_pipeline", "ddp_multinode") * 2):
        SyntheticRun(name, number, 60).write(folder / "runs")
    return folder


def execute_make_target(arguments: list[str], folder: Path, page_runs: Path) -> subprocess.CompletedProcess[str]:
    """Execute a make target in a folder with runs and configs."""
    (folder / "runs").symlink_to(page_runs / "runs")
    (folder / "configs").symlink_to(ROOT / "configs")
    run_names = sorted(path.name for path in (page_runs / "runs").glob("*-*"))
    ids = iter(run_names)
    arguments = [re.sub("<id>", lambda _: next(ids), argument) for argument in arguments]
    if shlex.join(arguments) in REAL_MAKE_COMMANDS:
        return subprocess.run(
            arguments, cwd=folder, env=make_environment(), capture_output=True, text=True, timeout=120, check=False
        )
    return make_targets.call_target(folder, *arguments[1:])


def check_page_command(command: str, cache: Path, script_runs: Path, make_folder: Path, page_runs: Path) -> None:
    """Execute a command, or check that the command exists if CI or another test executes it."""
    arguments = shlex.split(command)
    target = arguments[1] if arguments[0] == "make" else ""
    if command in CI_COMMANDS:
        lines = (ROOT / ".ci" / "run").read_text().splitlines()
        assert command in [line.removeprefix("timed ").removeprefix("tested ") for line in lines]
        return
    if target == "bench":  # tests/complete/test_sparse_prune_benchmarks.py runs one
        names = set()
        for part in all_parts():
            topic = part.name.partition("/")[0]
            names |= {f"NAME={part.name}", f"NAME={topic}"}
        assert arguments[2] in names
        return
    if target == "test" and len(arguments) > 2:
        assert (ROOT / arguments[-1].removeprefix("TESTS=")).exists()
        return
    if command in COMMANDS_TESTED_ELSEWHERE:
        assert not target or re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        check_test_file(COMMANDS_TESTED_ELSEWHERE[command], arguments)
        return
    process = (
        execute_make_target(arguments, make_folder, page_runs)
        if target
        else execute_script(arguments, cache, script_runs)
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout


def check_test_file(test_file: str, arguments: list[str]) -> None:
    """Check that the file contains a setting of the command or, without settings, a part of its make target.

    Does nothing if `test_file` is a reason why no test executes the command.
    """
    if not test_file.startswith("tests/"):
        return
    words = arguments[1].split("-") if arguments[0] == "make" else arguments[:1]
    if arguments[-1].startswith("ARGS="):
        settings = arguments[-1].removeprefix("ARGS=").split()
        words = [setting.partition("=")[0] for setting in settings]
    text = (ROOT / test_file).read_text()
    assert any(word in text for word in words), f"{test_file} contains none of {words}"


def execute_script(arguments: list[str], cache: Path, runs: Path) -> subprocess.CompletedProcess[str]:
    """Execute a Python command of a page. An experiment gets the settings of a short run."""
    script = arguments[1:2]
    small_settings: list[str] = []
    if arguments[1].startswith("experiments/"):
        settings = ["data.name=digits", f"data.cache={cache}", f"runs={runs}", "steps=6", "data.test_limit=100"]
        settings.append("launch.threads=1")  # another worker uses the other core
        name = Path(arguments[1]).stem
        small_settings = [*select_applicable_settings(name, settings), *ENTRY_BY_NAME[name].page_settings]
        script = [str(ROOT / arguments[1])]
    argv = [sys.executable, *script, *arguments[2:], *small_settings]
    return execution.execute_command(argv, env=make_environment())
