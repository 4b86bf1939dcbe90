"""What every experiment must do, for each entry of the one list."""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.checkpoint import storage
from common.checkpoint.rank_file import read_full_model
from common.config import config
from common.runs.result import parse_result
from configs.dataparallel import Replicated
from tests.harness.processes import Done, command, environment, run
from tests.harness.registry import ARCHETYPES, EXPERIMENTS, STAGED, Entry
from tests.harness.resuming import trained_steps
from tests.harness.shared import Make, run_once
from tests.harness.warm import ROOT, Command

every = pytest.mark.parametrize("entry", EXPERIMENTS, ids=lambda entry: entry.name)
archetype = pytest.mark.parametrize("entry", ARCHETYPES, ids=lambda entry: entry.name)


@pytest.fixture
def repeated(finished: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """That run again from its configuration, of an archetype with a profile, made once."""

    def make(entry: Entry) -> Done:
        file = finished(entry).folder.path / "config.yaml"
        profile = 2 if entry in ARCHETYPES else 0
        words = ("--config", str(file), f"profile={profile}")
        return run_once(tmp_path_factory, f"repeated-{entry.name}", entry.name, *words)

    return make


def test_the_list_is_complete() -> None:
    assert sorted(entry.name for entry in EXPERIMENTS) == config.list_experiments()


def check_that_it_trains(entry: Entry, done: Done) -> None:
    """The loss falls; of a new experiment, which may learn slowly, it is finite and the parameters change."""
    assert all(map(math.isfinite, done.losses))
    if entry.learns_at_once:
        assert done.losses[-1] < done.losses[0]
        return
    early, late = (read_full_model(one) for one in storage.list_checkpoints(done.folder.list_attempts()[0])[-2:])
    assert any(not torch.equal(early[name], late[name]) for name in early), "training changes no parameter"


@every
def test_run_folder_holds_everything(entry: Entry, finished: Make) -> None:
    done = finished(entry)
    assert done.status == 0, done.err
    folder = done.folder
    assert folder.path.name.startswith(entry.name + "-")
    result = done.result
    assert result["state"] == "finished" and result["exit_status"] == 0
    assert set(entry.produces) <= result.keys()
    meta = json.loads((folder.path / "meta.json").read_text())
    assert meta["data"]["name"] == ("digits" if entry.trains else "none") and meta["packages"]["torch"]
    assert meta["world"]["processes"] == entry.processes == len(meta["world"]["hosts"])
    assert meta["history"][0]["state"] == "finished" and meta["history"][0]["end"]
    rows = folder.read_metrics()
    assert trained_steps(folder) == list(range(1, 41))
    if entry.trains:
        assert result["data"] == "digits" and result["test_samples"] == rows[-1]["test_samples"] == 333
        assert len(done.losses) == 40
        check_that_it_trains(entry, done)
    for rank in range(entry.processes):
        assert "Warning" not in folder.list_attempts()[0].log_file(rank).read_text()
        assert (folder.list_attempts()[0].attempt_folder / f"heartbeat-{rank}.json").exists()


@every
def test_the_run_keeps_its_source(entry: Entry, finished: Make) -> None:
    code = finished(entry).folder.path / "code"
    script = Path("experiments") / f"{entry.name}.py"
    assert (code / script).read_text() == (ROOT / script).read_text()
    assert (code / "common" / "training" / "run.py").exists() and (code / "configs" / f"{entry.name}.yaml").exists()


@every
def test_the_screen_tells_the_essentials(entry: Entry, finished: Make) -> None:
    done = finished(entry)
    of_training = ("data digits", "test accuracy", "samples/s") if entry.trains else ()
    for words in (*of_training, str(done.folder.path), "make rerun"):
        assert words in done.out
    assert not done.err
    rows = dict(line.split(maxsplit=1) for line in done.out.splitlines() if line.startswith("  re"))
    assert rows["result"] == str(done.folder.path / "result.json")
    assert shlex.split(rows["repeat"]) == ["make", "rerun", f"RUN={done.folder.path}"]


@every
def test_the_run_is_repeated_from_its_config_to_the_bit(entry: Entry, finished: Make, repeated: Make) -> None:
    first, second = finished(entry), repeated(entry)
    assert trained_steps(first.folder) == trained_steps(second.folder) and first.losses == second.losses
    then, now = (parse_result(done.folder.result).select_repeatable() for done in (first, second))
    assert then == now and len(then) > 1


@archetype
def test_profile_writes_a_trace_per_rank(entry: Entry, repeated: Make) -> None:
    done = repeated(entry)
    assert done.status == 0, done.err
    for rank in range(entry.processes):
        trace = json.loads((done.folder.list_attempts()[0].attempt_folder / f"trace-{rank}.json").read_text())
        assert trace["traceEvents"]
    assert "Self CPU" in done.out and "# of Calls" in done.out


@archetype
def test_another_seed_gives_another_run_and_a_log_level_quietens_only_the_screen(
    entry: Entry, finished: Make, tmp_path: Path
) -> None:
    file = finished(entry).folder.path / "config.yaml"
    other = run(entry.name, "--config", str(file), "seed=1", "log.level=error", runs=tmp_path)
    assert len(other.losses) == 40 and other.losses != finished(entry).losses
    assert "test accuracy" not in other.out
    assert "test accuracy" in other.folder.list_attempts()[0].log_file(0).read_text()


def test_a_terminal_gets_a_progress_bar(cache: Path, tmp_path: Path) -> None:
    words = command(STAGED.name, f"data.cache={cache}", "data.name=digits", "data.test_limit=300", runs=tmp_path)
    words += ["steps=100", "log.seconds=0.05", "eval_batch=1", *STAGED.smallest]
    typed = " ".join(f"'{word}'" for word in words)
    done = subprocess.run(
        ["script", "-qec", typed, "/dev/null"],
        cwd=ROOT,
        env=environment(TERM="xterm", COLUMNS="120"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "100/100" in done.stdout and "━" in done.stdout
    assert re.search("evaluation .*/300", done.stdout)


def test_the_script_answers_questions_without_training(tmp_path: Path) -> None:
    for question in ("--help", "--print-config"):
        done = run(STAGED.name, question, runs=tmp_path / "runs")
        assert done.status == 0 and "batch" in done.out
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_while_torch_is_imported_is_answered_in_one_line(tmp_path: Path) -> None:
    process = Command(command(STAGED.name, "--help", runs=tmp_path), env=environment(), real=True)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.communicate(120) == ("", "\nstopped by Ctrl-C\n")
    assert process.returncode == 128 + signal.SIGINT


@every
def test_every_script_begins_and_ends_alike(entry: Entry) -> None:
    """So what is asked of one script holds for all: common comes before torch, and start() is all that runs."""
    text = (ROOT / "experiments" / f"{entry.name}.py").read_text()
    assert len(text.splitlines()) <= 220, "the method is what a script holds; the rest has its place in common"
    script = ast.parse(text)
    opening, future, first = script.body[:3]
    assert isinstance(opening, ast.Expr) and isinstance(opening.value, ast.Constant)
    assert ast.unparse(future) == "from __future__ import annotations"
    assert isinstance(first, ast.ImportFrom) and first.module == "common.api"
    assert any(alias.name == "start" for alias in first.names)
    last = script.body[-1]
    assert isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'" and not last.orelse
    assert re.fullmatch(r"start\(main, Config(, \S.*)?\)", "\n".join(map(ast.unparse, last.body)))
    passive = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    assert [node for node in script.body[1:-1] if not isinstance(node, passive)] == [], "nothing else happens"


@pytest.mark.parametrize(
    "name", [entry.name for entry in EXPERIMENTS if issubclass(config.import_schema(entry.name), Replicated)]
)
def test_the_mains_of_data_parallel_scripts_differ_in_their_technique_only(name: str) -> None:
    first, second = (read_main(script).splitlines() for script in ("ddp_multinode", name))
    assert sum(line[0] in "+-" for line in difflib.ndiff(first, second)) <= 40


def read_main(name: str) -> str:
    """The source of a script's main."""
    text = (ROOT / "experiments" / f"{name}.py").read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    return ast.get_source_segment(text, found[0]) or ""


def test_answers_need_no_torch() -> None:
    free = ["data.prepare", "data.sources", "checkpoint.storage", "checkpoint.extension", "models.initial_weights"]
    free += ["backend.algorithms", "backend.cost", "ranks.links.connecting", "training.custom_optimizer"]
    free += ["techniques.pipeline.schedules", "ranks.rank_info", "measure.straggler"]
    free += ["techniques.elastic.coordinator", "techniques.elastic.supervisor", "techniques.elastic.member"]
    free += [
        f"{package.replace('/', '.')}.{file.stem}"
        for package in ("config", "system", "runs", "runs/tracking", "runs/compare")
        for file in (ROOT / "common" / package).glob("[a-z]*.py")
    ]
    assert "runs.tracking.wandb_tracker" in free
    commands = ["__main__", "launch.submit", "launch.sweep", "launch.rerun", "reports.status", "reports.logs"]
    commands += ["launch.new_experiment", "launch.check_optimizer", "launch.experiment_sweep", "local_cluster.cli"]
    commands += ["reports.compare", "reports.doctor"]
    modules = ", ".join([*(f"slurm.{name}" for name in commands), *(f"common.{name}" for name in free)])
    program = f"import sys, {modules}\nprint('torch' in sys.modules, 'wandb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_common_import_loads_nothing_that_only_some_runs_need() -> None:
    heavy: tuple[str, ...] = (
        "matplotlib",
        "torchvision",
        "torchao",
        "wandb",
        "rich",
        "torch._dynamo",
        "torch.distributed.pipelining",
    )
    heavy += ("torch.distributed.fsdp", "torch.distributed.tensor", "safetensors")
    program = f"import sys, common.api\nprint([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
