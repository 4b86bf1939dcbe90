"""Requirements of every experiment, for each entry of the registry."""

from __future__ import annotations

import ast
import difflib
import itertools
import math
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
import torch

from common.checkpoint import storage
from common.checkpoint.rank_file import read_full_model
from common.config import config
from common.runs.folder import read_json
from common.runs.result import parse_result
from configs.dataparallel import Replicated
from tests.harness.commands import execution
from tests.harness.commands.execution import start_command
from tests.harness.commands.processes import FinishedRun, make_environment, make_run_command, run_experiment
from tests.harness.commands.programs import list_loaded_modules
from tests.harness.environment.randomness import draw_cases
from tests.harness.environment.shared_results import GetRun, run_experiment_once
from tests.harness.experiments.registry import ARCHETYPE_ENTRIES, ENTRIES, STAGED_ENTRY, Entry
from tests.harness.repository import ROOT
from tests.harness.runs.resuming import list_trained_steps

every = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
archetype = pytest.mark.parametrize("entry", ARCHETYPE_ENTRIES, ids=lambda entry: entry.name)


@pytest.fixture
def repeated(finished: GetRun, tmp_path_factory: pytest.TempPathFactory) -> GetRun:
    """The finished run of an experiment, repeated from its config; archetypes with a profile."""

    def make(entry: Entry) -> FinishedRun:
        file = finished(entry).folder.path / "config.yaml"
        profile = 2 if entry in ARCHETYPE_ENTRIES else 0
        arguments = ("--config", str(file), f"profile={profile}")
        return run_experiment_once(tmp_path_factory, f"repeated-{entry.name}", entry.name, *arguments)

    return make


def test_the_list_is_complete() -> None:
    assert sorted(entry.name for entry in ENTRIES) == config.list_experiments()


def check_that_it_trains(entry: Entry, completed: FinishedRun) -> None:
    """Check that the loss falls; for a new experiment, only that it is finite and that parameters change."""
    assert all(map(math.isfinite, completed.losses))
    if entry.loss_decreases_early:
        assert completed.losses[-1] < completed.losses[0]
        return
    *_, previous, newest = storage.list_checkpoints(completed.folder.list_attempts()[0])
    parameters_before = read_full_model(previous)
    parameters = read_full_model(newest)
    is_changed = [not torch.equal(tensor, parameters[name]) for name, tensor in parameters_before.items()]
    assert any(is_changed), "training changes no parameter"


@every
def test_the_run_folder_contains_result_metadata_metrics_and_logs(entry: Entry, finished: GetRun) -> None:
    completed = finished(entry)
    folder = completed.folder
    assert folder.path.name.startswith(entry.name + "-")
    result = completed.result
    assert result["state"] == "finished"
    assert result["exit_status"] == 0
    assert set(entry.result_keys) <= result.keys()
    meta = read_json(folder.path / "meta.json")
    assert meta["data"]["name"] == (entry.data_name if entry.trains_model else "none")
    assert meta["packages"]["torch"]
    assert meta["world"]["processes"] == entry.processes == len(meta["world"]["hosts"])
    assert meta["history"][0]["state"] == "finished"
    assert meta["history"][0]["end"]
    rows = folder.read_metrics()
    assert list_trained_steps(folder) == list(range(1, 41))
    if entry.trains_model:
        assert result["data"] == entry.data_name
        assert result["test_samples"] == rows[-1]["test_samples"] == 333
        assert len(completed.losses) == 40
        check_that_it_trains(entry, completed)
    for rank in range(entry.processes):
        assert "Warning" not in folder.list_attempts()[0].log_file(rank).read_text()
        assert (folder.list_attempts()[0].attempt_folder / f"heartbeat-{rank}.json").exists()


@every
def test_each_step_has_its_learning_rate_gradient_norm_time_and_throughput(entry: Entry, finished: GetRun) -> None:
    rows = [row for row in finished(entry).folder.read_metrics() if "test_loss" not in row]
    names = {"learning_rate", "gradient_norm", "step_time", "samples_per_second"}
    if not entry.trains_model:
        assert names.isdisjoint(rows[-1]), "a measurement has no learning rate and no samples"
        return
    first_row = rows[0]
    assert names - first_row.keys() == {"step_time", "samples_per_second"}, "the first step is not timed"
    for previous, row in itertools.pairwise(rows):
        assert all(row[name] > 0 for name in names), row
        samples = row["samples"] - previous["samples"]
        assert row["samples_per_second"] == pytest.approx(samples / row["step_time"], rel=1e-3)
    assert rows[0]["learning_rate"] != rows[-1]["learning_rate"]


@every
def test_the_run_folder_contains_the_source_code(entry: Entry, finished: GetRun) -> None:
    code = finished(entry).folder.path / "code"
    script = Path("experiments") / f"{entry.name}.py"
    assert (code / script).read_text() == (ROOT / script).read_text()
    assert (code / "common/training/run.py").exists()
    assert (code / "configs" / f"{entry.name}.yaml").exists()


@every
def test_the_output_contains_scores_and_paths(entry: Entry, finished: GetRun) -> None:
    completed = finished(entry)
    scores = ["data " + entry.data_name, "test loss", "samples/s"] if entry.trains_model else []
    scores += ["test accuracy"] if entry.trains_model and entry.has_accuracy else []
    for part in (*scores, str(completed.folder.path), "make rerun"):
        assert part in completed.stdout
    assert not completed.stderr
    rows = dict(line.split(maxsplit=1) for line in completed.stdout.splitlines() if line.startswith("  re"))
    assert rows["result"] == str(completed.folder.path / "result.json")
    assert shlex.split(rows["repeat"]) == ["make", "rerun", f"RUN={completed.folder.path}"]


@pytest.mark.parametrize("entry", draw_cases("repeated runs", ENTRIES, 4), ids=lambda entry: entry.name)
def test_the_run_is_repeated_from_its_config_to_the_bit(entry: Entry, finished: GetRun, repeated: GetRun) -> None:
    first = finished(entry)
    second = repeated(entry)
    assert list_trained_steps(first.folder) == list_trained_steps(second.folder)
    assert first.losses == second.losses
    repeatable = parse_result(first.folder.result).select_repeatable()
    assert parse_result(second.folder.result).select_repeatable() == repeatable
    assert len(repeatable) > 1


@archetype
def test_profile_writes_a_trace_per_rank(entry: Entry, repeated: GetRun) -> None:
    completed = repeated(entry)
    for rank in range(entry.processes):
        trace = read_json(completed.folder.list_attempts()[0].attempt_folder / f"trace-{rank}.json")
        assert trace["traceEvents"]
    assert "Self CPU" in completed.stdout
    assert "# of Calls" in completed.stdout


@archetype
def test_another_seed_changes_the_losses_and_a_log_level_applies_to_the_screen_only(
    entry: Entry, finished: GetRun, tmp_path: Path
) -> None:
    file = finished(entry).folder.path / "config.yaml"
    other = run_experiment(entry.name, "--config", str(file), "seed=1", "log.level=error", runs=tmp_path)
    assert len(other.losses) == 40
    assert other.losses != finished(entry).losses
    assert "test accuracy" not in other.stdout
    assert "test accuracy" in other.folder.list_attempts()[0].log_file(0).read_text()


@pytest.mark.slow
def test_a_terminal_gets_a_progress_bar(cache: Path, tmp_path: Path) -> None:
    arguments = make_run_command(
        STAGED_ENTRY.name, f"data.cache={cache}", "data.name=digits", "data.test_limit=300", runs=tmp_path
    )
    arguments += ["steps=100", "log.seconds=0.05", "eval_batch=1", *STAGED_ENTRY.smallest_settings]
    on_terminal = ["script", "-qec", shlex.join(arguments), "/dev/null"]
    env = make_environment(TERM="xterm", COLUMNS="120")
    completed = execution.execute_command(on_terminal, env=env, real_process=True, status=0)
    assert "100/100" in completed.stdout
    assert "━" in completed.stdout
    assert re.search("evaluation .*/300", completed.stdout)


def test_help_and_print_config_do_not_train(tmp_path: Path) -> None:
    for option in ("--help", "--print-config"):
        completed = run_experiment(STAGED_ENTRY.name, option, runs=tmp_path / "runs")
        assert "batch" in completed.stdout
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_while_torch_is_imported_is_answered_in_one_line(tmp_path: Path) -> None:
    argv = make_run_command(STAGED_ENTRY.name, "--help", runs=tmp_path)
    with start_command(argv, env=make_environment(), real_process=True) as process:
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.communicate(120) == ("", "\nstopped by Ctrl-C\n")
    assert process.returncode == 128 + signal.SIGINT


@every
def test_every_script_imports_common_first_and_only_calls_start(entry: Entry) -> None:
    text = (ROOT / "experiments" / f"{entry.name}.py").read_text()
    assert len(text.splitlines()) <= 220, "a script contains the method; other code belongs to common"
    script = ast.parse(text)
    opening, future, first = script.body[:3]
    assert isinstance(opening, ast.Expr)
    assert isinstance(opening.value, ast.Constant)
    assert ast.unparse(future) == "from __future__ import annotations"
    assert isinstance(first, ast.ImportFrom)
    assert first.module == "common.api"
    assert any(alias.name == "start" for alias in first.names)
    last = script.body[-1]
    assert isinstance(last, ast.If)
    assert ast.unparse(last.test) == "__name__ == '__main__'"
    assert not last.orelse
    assert re.fullmatch(r"start\(main, Config(, \S.*)?\)", "\n".join(map(ast.unparse, last.body)))
    passive = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in script.body[1:-1]:
        assert isinstance(node, passive), "only the call of start executes code"


@pytest.mark.parametrize(
    "name", [entry.name for entry in ENTRIES if issubclass(config.import_schema(entry.name), Replicated)]
)
def test_the_mains_of_data_parallel_scripts_differ_in_their_technique_only(name: str) -> None:
    first, second = (read_main(script).splitlines() for script in ("ddp_multinode", name))
    assert sum(line[0] in "+-" for line in difflib.ndiff(first, second)) <= 40


def read_main(name: str) -> str:
    """Return the source of the main function of a script."""
    text = (ROOT / "experiments" / f"{name}.py").read_text()
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    return ast.get_source_segment(text, functions["main"]) or ""


def test_answers_need_no_torch() -> None:
    free = ["data.prepare", "data.sources", "checkpoint.storage", "checkpoint.extension", "models.initial_weights"]
    free += ["backend.algorithms", "backend.cost", "ranks.links.connecting", "training.custom_optimizer"]
    free += [
        "techniques.pipeline.schedules",
        "techniques.pipeline.custom_schedules",
        "ranks.rank_info",
        "measure.straggler",
    ]
    free += ["techniques.elastic.coordinator", "techniques.elastic.supervisor", "techniques.elastic.member"]
    for package in ("config", "system", "runs", "runs/tracking", "runs/compare"):
        files = (ROOT / "common" / package).glob("[a-z]*.py")
        free += [f"{package.replace('/', '.')}.{file.stem}" for file in files]
    assert "runs.tracking.wandb_tracker" in free
    commands = ["__main__", "launch.submit", "launch.sweep", "launch.rerun", "reports.status_table"]
    commands += ["launch.new_experiment", "launch.check_optimizer", "launch.experiment_sweep", "local_cluster.cli"]
    commands += ["reports.archive", "reports.compare", "reports.doctor", "reports.logs", "reports.note"]
    commands += ["reports.prune_runs"]
    commands += ["reports.wandb_dashboard", "reports.wandb_sync"]
    modules = ", ".join([f"slurm.{name}" for name in commands] + [f"common.{name}" for name in free])
    assert list_loaded_modules(modules, ["torch", "wandb"]) == []


def test_the_common_import_loads_nothing_that_only_some_runs_need() -> None:
    heavy = ["matplotlib", "torchvision", "torchao", "wandb", "rich", "torch._dynamo", "safetensors"]
    heavy += ["torch.distributed.pipelining", "torch.distributed.fsdp", "torch.distributed.tensor"]
    assert list_loaded_modules("common.api", heavy) == []
