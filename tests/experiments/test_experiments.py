"""What every experiment must do, for each entry of the one list."""

from __future__ import annotations

import ast
import graphlib
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import config
from tests.harness.processes import ROOT, Done, command, environment, run
from tests.harness.registry import EXPERIMENTS, Entry

every = pytest.mark.parametrize("entry", EXPERIMENTS, ids=lambda entry: entry.name)


class Once(dict[str, Any]):
    """What is made of an experiment when a test first asks for it, so that its time is that test's."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Done, Done]]:
    """Each experiment, run twice with the same settings."""
    smallest = {entry.name: entry.smallest for entry in EXPERIMENTS}
    common = (f"data.cache={cache}", "data.name=digits", "data.test_limit=333", "epochs=1", "steps=40")

    def make(name: str) -> tuple[Done, ...]:
        folders = [tmp_path_factory.mktemp(name) / "my runs" for _ in range(2)]
        return tuple(run(name, *common, *smallest[name], runs=folder) for folder in folders)

    return Once(make)


@pytest.fixture(scope="module")
def again(finished: dict[str, tuple[Done, Done]], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Once]:
    """Each first run from its configuration, with a few words more."""

    def repeat(name: str, *words: str) -> Done:
        file = str(finished[name][0].folder.path / "config.yaml")
        return run(name, "--config", file, *words, runs=tmp_path_factory.mktemp(name))

    return lambda *words: Once(lambda name: repeat(name, *words))


@pytest.fixture(scope="module")
def repeated(again: Callable[..., Once]) -> dict[str, Done]:
    """Each first run again, now with a profile."""
    return again("profile=2")


@pytest.fixture(scope="module")
def other(again: Callable[..., Once]) -> dict[str, Done]:
    """Each first run again, with another seed and a quiet screen."""
    return again("seed=1", "log.level=error")


def test_the_list_is_complete() -> None:
    assert sorted(entry.name for entry in EXPERIMENTS) == config.names()


@every
def test_run_folder_holds_everything(entry: Entry, finished: dict[str, tuple[Done, Done]]) -> None:
    done = finished[entry.name][0]
    assert done.status == 0, done.err
    folder = done.folder
    assert folder.path.name.startswith(entry.name + "-")
    result = folder.result
    assert result["state"] == "finished" and result["exit_status"] == 0
    assert set(entry.produces) <= result.keys()
    assert result["data"] == "digits" and result["test_samples"] == 333
    meta = json.loads((folder.path / "meta.json").read_text())
    assert meta["data"]["name"] == "digits" and meta["packages"]["torch"]
    assert meta["world"]["processes"] == entry.processes == len(meta["world"]["hosts"])
    assert meta["history"][0]["state"] == "finished" and meta["history"][0]["end"]
    rows = folder.metrics()
    assert [row["global_step"] for row in rows if "loss" in row] == list(range(1, 41))
    assert rows[-1]["test_samples"] == 333
    for rank in range(entry.processes):
        assert "Warning" not in folder.attempts()[0].log_file(rank).read_text()
        assert (folder.attempts()[0].attempt / f"heartbeat-{rank}.json").exists()


@every
def test_the_run_keeps_its_source(entry: Entry, finished: dict[str, tuple[Done, Done]]) -> None:
    code = finished[entry.name][0].folder.path / "code"
    script = Path("experiments") / f"{entry.name}.py"
    assert (code / script).read_text() == (ROOT / script).read_text()
    assert (code / "common" / "run.py").exists() and (code / "configs" / f"{entry.name}.yaml").exists()


@every
def test_same_command_gives_the_same_bits(entry: Entry, finished: dict[str, tuple[Done, Done]]) -> None:
    first, second = finished[entry.name]
    assert len(first.losses) == 40 and first.losses == second.losses
    assert first.losses[-1] < first.losses[0]


@every
def test_the_run_is_repeated_from_its_config(
    entry: Entry, finished: dict[str, tuple[Done, Done]], repeated: dict[str, Done]
) -> None:
    assert repeated[entry.name].losses == finished[entry.name][0].losses


@every
def test_another_seed_gives_another_run(
    entry: Entry, finished: dict[str, tuple[Done, Done]], other: dict[str, Done]
) -> None:
    assert len(other[entry.name].losses) == 40 and other[entry.name].losses != finished[entry.name][0].losses


@every
def test_the_screen_tells_the_essentials(entry: Entry, finished: dict[str, tuple[Done, Done]]) -> None:
    done = finished[entry.name][0]
    for words in ("data digits", "test accuracy", "samples/s", str(done.folder.path), "--config"):
        assert words in done.out
    assert not done.err
    shown, repeated = (shlex.split(line)[1:] for line in done.out.splitlines() if line.split()[0] in ("show", "repeat"))
    assert shown == ["cat", str(done.folder.path / "result.json")]
    assert repeated[-1] == str(done.folder.path / "config.yaml")


@every
def test_profile_writes_a_trace_per_rank(entry: Entry, repeated: dict[str, Done]) -> None:
    done = repeated[entry.name]
    assert done.status == 0, done.err
    for rank in range(entry.processes):
        trace = json.loads((done.folder.attempts()[0].attempt / f"trace-{rank}.json").read_text())
        assert trace["traceEvents"]
    assert "Self CPU" in done.out and "# of Calls" in done.out


@every
def test_log_level_quietens_the_screen_and_not_the_file(entry: Entry, other: dict[str, Done]) -> None:
    done = other[entry.name]
    assert "test accuracy" not in done.out
    assert "test accuracy" in done.folder.attempts()[0].log_file(0).read_text()


@every
def test_a_terminal_gets_a_progress_bar(entry: Entry, cache: Path, tmp_path: Path) -> None:
    words = command(entry.name, f"data.cache={cache}", "data.name=digits", "data.test_limit=100", runs=tmp_path)
    words += ["steps=300", "log.seconds=0.05", *entry.smallest]
    typed = " ".join(f"'{word}'" for word in words)
    done = subprocess.run(
        ["script", "-qec", typed, "/dev/null"],
        cwd=ROOT,
        env=environment(TERM="xterm", COLUMNS="120"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "300/300" in done.stdout and "━" in done.stdout


@every
def test_the_script_answers_questions_without_training(entry: Entry, tmp_path: Path) -> None:
    for question in ("--help", "--print-config"):
        done = run(entry.name, question, runs=tmp_path / "runs")
        assert done.status == 0 and "batch" in done.out
    assert not (tmp_path / "runs").exists()


@every
def test_ctrl_c_while_torch_is_imported_is_answered_in_one_line(entry: Entry, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(entry.name, "--help", runs=tmp_path),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 (a shell's & ignores it)
    )
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "\nstopped by Ctrl-C\n")
    assert process.returncode == 128 + signal.SIGINT


def test_no_room_below_knows_one_above() -> None:
    """experiments -> common -> configs; slurm -> common, configs; no experiment imports another."""
    allowed = {
        "experiments": {"common", "configs"},
        "slurm": {"common", "configs"},
        "common": {"configs"},
        "configs": set(),
    }
    for room, others in allowed.items():
        for file in (ROOT / room).glob("*.py"):
            lines = [line.split() for line in file.read_text().splitlines()]
            imported = {words[1].split(".")[0] for words in lines if words[:1] in (["import"], ["from"]) and words[1:]}
            rooms = imported & {"experiments", "common", "configs", "slurm", "tests"}
            assert rooms <= others | {room}, file
            assert not (room == "experiments" and "experiments" in rooms), file


def test_common_imports_in_no_circle() -> None:
    """Imports inside functions count: they, too, say who knows whom."""
    rooms = {f"common.{file.stem}": file for file in (ROOT / "common").glob("*.py")}
    graph: dict[str, set[str]] = {}
    for room, file in rooms.items():
        known: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                known |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}: relative imports are not followed here"
                known |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        graph[room] = known & rooms.keys()
    assert graph["common.start"] > {"common.run", "common.processes"}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_answers_need_no_torch() -> None:
    program = "import sys, slurm.submit, common.folder, common.prepare, common.snapshots, common.tracking\n"
    program += "print('torch' in sys.modules, 'wandb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
