"""`sweep=true`: a script starts the runs of its sweep, and ends after a stop request or a refused run."""

from __future__ import annotations

import csv
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from common.runs.folder import RunFolder, read_json
from common.system.errors import UserError
from configs.ddp_multinode import Config
from slurm.launch import experiment_sweep, sweep
from slurm.launch.sweep_file import SweepPlan, SweepPoint
from slurm.launch.sweep_folder import SweepFolder
from tests.harness.runs.synthetic_runs import SyntheticRun

NAME = "resnet_dataparallel"
SETTINGS = ["repeats=1", "data.name=digits", "sweep=true"]

SweepRuns = Callable[[str], int]


@pytest.fixture
def sweep_runs(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> SweepRuns:
    """Sweep with a shell script instead of each run, whose folder is $RUN; returns the exit status."""

    def sweep_with(script: str) -> int:
        def start_script(folder: RunFolder) -> subprocess.Popen[bytes]:
            return subprocess.Popen(["sh", "-c", f"RUN={shlex.quote(str(folder.path))}; {script}"])

        monkeypatch.setattr(sweep, "start_local_run_of_point", start_script)
        return experiment_sweep.main(NAME, [*SETTINGS, f"data.cache={cache}", f"runs={tmp_path}"])

    return sweep_with


@pytest.mark.parametrize("name, status", [("INT", 130), ("USR2", 140), ("TERM", 143)])
def test_a_stop_request_ends_the_sweep_after_the_current_run(
    name: str, status: int, tmp_path: Path, sweep_runs: SweepRuns, capfd: pytest.CaptureFixture[str]
) -> None:
    number = signal.Signals[f"SIG{name}"]
    previous = signal.signal(number, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    write_result = """echo '{"format": 2, "state": "finished", "exit_status": 0}' >$RUN/result.json"""
    try:
        assert sweep_runs(f"{write_result}; kill -{name} {os.getpid()}") == status
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, previous)

    captured = capfd.readouterr()
    assert "FINISHED" in captured.out
    message = r"the sweep was stopped after 1 of \d+ runs; a new sweep runs all points again\n"
    assert re.fullmatch(message, captured.err)
    (folder,) = (tmp_path / "sweeps").iterdir()
    (cell,) = read_json(folder / "sweep.json")["cells"]
    assert cell["state"] == "finished"
    assert cell["run"] in (folder / "table.csv").read_text()


@pytest.mark.parametrize("status", [75, 130])
def test_a_stopped_run_ends_the_sweep(
    status: int, tmp_path: Path, sweep_runs: SweepRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run fails and is not listed as stopped; the second run is stopped."""
    is_first = f"mkdir {tmp_path / 'failed'} 2>/dev/null"
    choose_state = f"{is_first} && STATE=failed STATUS=1 || STATE=cancelled STATUS={status}"
    write_result = """echo '{"format": 2, "state": "'$STATE'", "exit_status": '$STATUS'}' >$RUN/result.json"""
    assert sweep_runs(f"{choose_state}; {write_result}; exit $STATUS") == status
    _, stopped = sorted(tmp_path.glob(f"{NAME}-*"), key=lambda path: path.stat().st_mtime_ns)
    first_line, *other_lines = capsys.readouterr().err.splitlines()
    assert first_line.startswith("the sweep was stopped after 0 of ")
    remedy = f"no checkpoint found; to restart from step 0: make exp RESUME={stopped}"
    assert other_lines == [f"{stopped.name}: {remedy}"]


def test_the_folder_of_a_run_that_has_trained_is_not_deleted(tmp_path: Path, sweep_runs: SweepRuns) -> None:
    script = "mkdir -p $RUN/attempts/0001; echo 'error: attempt 1 was superseded' >$RUN/screen.log; exit 2"
    assert sweep_runs(script) == 1
    run_paths = list(tmp_path.glob(f"{NAME}-*"))
    assert run_paths
    assert all((path / "screen.log").exists() for path in run_paths)


def test_a_sweep_that_cannot_be_recorded_stops_its_runs(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = []

    def start_and_block_record(folder: RunFolder) -> subprocess.Popen[bytes]:
        (sweep_path,) = (tmp_path / "sweeps").iterdir()
        (sweep_path / "sweep.json").mkdir()
        process = subprocess.Popen(["sleep", "600"])
        processes.append(process)
        return process

    monkeypatch.setattr(sweep, "start_local_run_of_point", start_and_block_record)
    with pytest.raises(OSError, match=r"sweep\.json"):
        experiment_sweep.main(NAME, [*SETTINGS, f"data.cache={cache}", f"runs={tmp_path}"])
    assert [process.returncode for process in processes] == [-signal.SIGTERM]


def test_a_refused_run_ends_the_sweep_with_its_error(tmp_path: Path, sweep_runs: SweepRuns) -> None:
    with pytest.raises(UserError, match=r"^no GPU is visible$"):
        sweep_runs("echo 'error: no GPU is visible' >$RUN/screen.log; exit 2")
    assert not list((tmp_path / "sweeps").iterdir())
    assert not list(tmp_path.glob(f"{NAME}-*"))


def test_a_result_does_not_replace_the_setting_of_the_same_name(tmp_path: Path) -> None:
    points = [SweepPoint({"criterion": "none"}, 0, Config()), SweepPoint({"sparsity": 0.9}, 0, Config())]
    sweep_path = tmp_path / "sweeps" / "levels"
    sweep_path.mkdir(parents=True)
    plan = SweepPlan("levels", "ddp_multinode", {}, points, parallel=1)
    table = experiment_sweep.ResultTable(SweepFolder(sweep_path, plan))
    for number, point in enumerate(points):
        run = SyntheticRun("ddp_multinode", number, 4, result={"measured": {"sparsity": 0.25 * number}})
        table.add_run(point, run.write(tmp_path), 0)
    with open(sweep_path / "table.csv") as file:
        dense, sparse = csv.DictReader(file)
    assert (dense["sparsity"], dense["result.sparsity"]) == ("", "0.0")
    assert (sparse["sparsity"], sparse["result.sparsity"]) == ("0.9", "0.25")
    assert sparse["test_accuracy"] == "0.96"


NO_SWEEP = "with srun, torchrun, RESUME, or --resume"


def test_a_sweep_cannot_resume_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=NO_SWEEP):
        experiment_sweep.main(NAME, [*SETTINGS, "--resume=runs/x", f"runs={tmp_path}"])


def test_a_rank_cannot_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UserError, match=NO_SWEEP):
        experiment_sweep.main(NAME, [*SETTINGS, f"runs={tmp_path}"])
