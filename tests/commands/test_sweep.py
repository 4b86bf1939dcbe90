"""`make sweep`: every point is run once, also after interruptions; invalid files are refused with the remedy."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.config import read_config_file
from common.runs import claims, provenance
from common.runs.folder import RunFolder, read_json
from common.runs.result import Result
from common.system.errors import UserError
from slurm.launch import sweep, sweep_file
from slurm.scheduling import scheduler
from tests.harness.commands import in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.environment.randomness import draw_cases
from tests.harness.repository import ROOT
from tests.harness.runs.damaged_runs import DAMAGES
from tests.harness.runs.process_records import Popen, identify_process
from tests.harness.runs.sweeps import (
    DIVERGING_SETTINGS,
    TINY_RUN_SETTINGS,
    check_failed_point_is_repeated,
    read_cells,
    run_sweep,
    write_grid,
    write_interrupted_sweep,
)
from tests.harness.slurm.fake_slurm import FakeSlurm, execute_module


def refused(file: Path, *arguments: str, cwd: Path = ROOT) -> str:
    """Return the single line that refuses a sweep."""
    completed = in_process_calls.call_verb("sweep", "--launch=local", *arguments, "--", str(file), cwd=cwd, status=2)
    assert completed.stderr.startswith("error: "), completed.stderr
    assert completed.stderr.count("\n") == 1, completed.stderr
    return completed.stderr


def sweep_on(fake: FakeSlurm, file: Path, *options: str, status: int = 0) -> Completed:
    """Call `sweep` within this process, with SLURM's commands as scripts."""
    arguments = ("--launch=slurm", *options, "--", str(file))
    return in_process_calls.call_verb("sweep", *arguments, cwd=ROOT, status=status, **fake.make_environment())


def test_a_failed_point_is_run_again_only_on_request(tmp_path: Path, cache: Path) -> None:
    points = [{"optim.lr": rate} for rate in ("0.01", "100")]
    file = write_grid(tmp_path, cache, points=points, settings=DIVERGING_SETTINGS)
    runs = write_interrupted_sweep(tmp_path, points, "finished", "failed")
    nothing = run_sweep(file)
    assert "(1 finished, 1 failed); 0 to run now" in nothing.stdout
    first, _ = check_failed_point_is_repeated(file, runs[1])
    assert (first["run"], first["state"]) == (runs[0], "finished")


INVALID_FILES = {
    "grdi: {}": "unknown key grdi; did you mean grid?",
    "experiment:": "experiment is missing; add a line such as experiment: amp_accum",
    "experiment: mnist_pipelin": "unknown experiment 'mnist_pipelin'; did you mean mnist_pipeline?",
    "experiment: mnist_pipeline": "the sweep has 0 points; specify 1 to 10,000 points",
    "grid: {batch: 64}": "grid: batch: expected a list of values",
    "grid: {bath: [64]}": "point bath=64: unknown key bath; did you mean batch?",
    "grid: {batch: [64, x]}": "point batch=x: batch=x: expected an integer",
    "points: [batch: 4, batch: 4]": "the point batch=4 is listed more than once",
    "points: [batch: 4]\nrepeats: 0": "repeats must be an integer from 1",
    "grid: {optim.lr: [0.1], optim: {lr: [0.2]}}": "duplicate key 'optim.lr'; remove one of them",
    "points: [batch: 4]\nnodes: 2\nsettings: {launch.nodes: 3}": "nodes and launch.nodes in settings are both given",
    "points: [seed: 1]\nrepeats: 2": "repeats=2 cannot be combined with points that set seed",
    "points: [batch]": "points: expected `key: value`",
    "points: [runs: x]\nsettings: {runs: y}": "runs must be the same for all points",
    "points: [runs: x, runs: y]": "runs must be the same for all points",
    "[]": "expected `key: value` lines, including experiment",
}


@pytest.mark.parametrize("text, message", INVALID_FILES.items())
def test_an_invalid_file_is_refused_with_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text if text.startswith(("experiment", "[")) else f"experiment: mnist_pipeline\n{text}")
    assert message in refused(file, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("dry", ["", "1"])
def test_an_elastic_point_is_refused_on_a_cluster_before_anything_is_created(tmp_path: Path, dry: str) -> None:
    settings = {key: value for key, value in TINY_RUN_SETTINGS.items() if key not in ("width", "stages")}
    tree = {"experiment": "ddp_multinode", "settings": settings | {"elastic": "true", "runs": str(tmp_path / "runs")}}
    file = tmp_path / "rates.yaml"
    file.write_text(yaml.safe_dump(tree | {"points": [{"optim.lr": "0.01"}]}))
    completed = execute_module(
        FakeSlurm(tmp_path), "slurm", "sweep", "--launch=slurm", f"--dry-run={dry}", "--", str(file), status=2
    )
    assert completed.stderr.count("\n") == 1, completed.stdout + completed.stderr
    assert "elastic=true is not supported in the job array" in completed.stderr
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_lists_the_points_and_creates_nothing(tmp_path: Path, cache: Path) -> None:
    points = [{"batch": "32"}, {"batch": "64"}]
    file = write_grid(tmp_path, cache, points=points)
    (run,) = write_interrupted_sweep(tmp_path, points, "finished")
    before = sorted(tmp_path.rglob("*"))
    completed = in_process_calls.call_verb("sweep", "--launch=local", "--dry-run=1", "--", str(file))
    assert completed.stdout == f"  FINISHED   batch=32  {run}\n  MISSING    batch=64\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sweep_on_a_cluster_is_an_array_that_is_followed_to_the_end(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is read three times, and both runs end before the third time."""
    for name, value in (("QUEUE_CACHE", {}), ("QUEUE_CACHE_SECONDS", 0)):
        monkeypatch.setattr(scheduler, name, value)
    monkeypatch.setattr("slurm.launch.sweep.POLL_SECONDS", 0.01)
    file = write_grid(tmp_path, cache, points=[{"batch": "32"}, {"batch": "64"}], parallel="2")
    fake = FakeSlurm(tmp_path)
    runs = tmp_path / "runs"
    looked = tmp_path / "looked"
    result = '{"state": "finished", "exit_status": 0}'
    ends = f"for run in {runs}/mnist_pipeline-*; do echo '{result}' >$run/result.json; done"
    queue = "printf '4711_0|RUNNING|None\\n4711_1|PENDING|JobArrayTaskLimit\\n'"
    fake.define_command("squeue", f"echo >>{looked}; if [ $(wc -l <{looked}) = 3 ]; then {ends}; fi; {queue}")
    completed = sweep_on(fake, file, "--follow=1")
    assert "(2 missing); 2 to run now" in completed.stdout
    assert "job 4711 on SLURM: array of 2 jobs, at most 2 at a time, 1 node and 1 rank each" in completed.stdout
    states = [line.split()[0] for line in completed.stdout.splitlines() if "  batch=" in line]
    assert states == ["RUNNING", "PENDING", "FINISHED", "FINISHED"], completed.stdout
    for number, cell in enumerate(read_cells(file)):
        assert cell["state"] == "finished"
        assert read_json(runs / cell["run"] / "meta.json")["job"]["id"] == f"4711_{number}"
    assert "#SBATCH --array=0-1%2\n" in (runs / "sweeps/rates/submit/job.sh").read_text()


def test_a_refused_sweep_changes_no_point(tmp_path: Path, cache: Path) -> None:
    points = [{"batch": "32"}, {"batch": "64"}]
    file = write_grid(tmp_path, cache, points=points)
    fake = FakeSlurm(tmp_path)
    runs = write_interrupted_sweep(tmp_path, points, "failed")
    fake.define_command("sbatch", "echo 'sbatch: error: invalid account' >&2; exit 1")
    for failed in ("0", "1"):  # the point that is missing, then the one that has failed
        completed = sweep_on(fake, file, f"--failed={failed}", status=2)
        assert "; 1 to run now" in completed.stdout
        assert "SLURM rejected the job: sbatch: error: invalid account" in completed.stderr
        assert [cell["run"] for cell in read_cells(file)] == runs
        assert [path.name for path in (tmp_path / "runs").glob("mnist_pipeline-*")] == runs


def test_the_runs_of_an_array_that_cannot_be_recorded_are_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(provenance, "update_metadata", refuse)
    file = write_grid(tmp_path, cache, points=[{"batch": "32"}, {"batch": "64"}])
    message = "job 4711 was submitted but not recorded: the disk is full; to cancel the job, run scancel 4711"
    assert message in sweep_on(FakeSlurm(tmp_path), file, status=2).stderr
    for cell in read_cells(file):
        assert (tmp_path / "runs" / cell["run"]).is_dir()


@pytest.mark.parametrize("option", ["--help", "--print-config", "--config F", "--resume=F", "-h"])
def test_an_option_in_args_starts_no_sweep(tmp_path: Path, cache: Path, option: str) -> None:
    file = write_grid(tmp_path, cache, points=[{"batch": "32"}])
    assert f"ARGS: {option.split(maxsplit=1)[0]} is not a setting" in refused(file, f"--args=steps=5 {option}")
    assert not (tmp_path / "runs").exists()


def test_other_settings_under_the_same_name_are_refused(tmp_path: Path, cache: Path) -> None:
    file = write_grid(tmp_path, cache, points=[{"batch": "32"}])
    folder = tmp_path / "runs/sweeps/rates"
    folder.mkdir(parents=True)
    plan = sweep_file.read_sweep_file(str(file), [])
    for settings, arguments, message in (
        (plan.settings | {"epochs": "3"}, (), "was started with epochs=3; use ARGS=epochs=3, or rename the sweep file"),
        (
            plan.settings | {"steps": "7", "clip": "2"},
            ("--args=epochs=2",),
            "started with steps=7 clip=2; use ARGS='steps=7 clip=2' without epochs=2, or",
        ),
        (plan.settings, ("--args=epochs=2",), "was started without epochs=2; omit epochs=2, or rename the sweep file"),
    ):
        other = {"experiment": "mnist_pipeline", "settings": settings, "cells": []}
        (folder / "sweep.json").write_text(json.dumps(other))
        for dry in ((), ("--dry-run=1",)):
            assert message in refused(file, *arguments, *dry)


@pytest.mark.parametrize("damage", draw_cases("damaged sweeps", [*DAMAGES, "a path", "a number"], 3))
def test_a_damaged_sweep_is_refused_and_not_restarted(damage: str, tmp_path: Path, cache: Path) -> None:
    points = [{"batch": "32"}, {"batch": "64"}]
    file = write_grid(tmp_path, cache, points=points)
    write_interrupted_sweep(tmp_path, points, "finished")
    sweep_record = tmp_path / "runs/sweeps/rates/sweep.json"
    if damage in DAMAGES:
        content = DAMAGES[damage](sweep_record.read_bytes())
    else:
        cell = {"values": points[0], "repeat": 0, "run": "../../elsewhere" if damage == "a path" else 3}
        content = json.dumps({"cells": [cell]}).encode()
    sweep_record.write_bytes(content)
    for arguments in ((), ("--dry-run=1",), ("--failed=1",)):
        assert "sweep.json is damaged; restore it, or delete it" in refused(file, *arguments)
    completed = in_process_calls.call_verb("compare", f"--runs-folder={tmp_path / 'runs'}", "--sweep=rates", status=2)
    assert "sweep.json is damaged" in completed.stderr
    assert sweep_record.read_bytes() == content


def test_repeats_have_different_seeds(tmp_path: Path, cache: Path) -> None:
    file = write_grid(tmp_path, cache, grid={"batch": ["32", "64"]}, repeats="3")
    points = sweep_file.read_sweep_file(str(file), ["seed=5"]).points
    expected = list(itertools.product((5, 6, 7), ("32", "64")))
    assert [(point.settings.seed, point.values["batch"]) for point in points] == expected


@pytest.mark.parametrize("file", sorted((ROOT / "configs/sweeps").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_grid_is_valid(file: Path) -> None:
    assert sweep_file.read_sweep_file(str(file), []).points
    assert re.match(r"#.*make sweep GRID=configs/sweeps/", file.read_text())


@pytest.mark.parametrize("experiment, points", [("amp_accum", 9), ("resnet_dataparallel", 2)])
def test_a_python_grid_has_the_points_that_its_experiment_sweeps(experiment: str, points: int) -> None:
    grid = sweep_file.read_sweep_file(f"configs/sweeps/{experiment}.py", ["launch.device=cpu"])
    assert grid.experiment == experiment
    assert len(grid.points) == points


def test_a_python_grid_without_repeated_runs_refuses_repeats() -> None:
    with pytest.raises(UserError, match="repeats applies to sweep=true only"):
        sweep_file.read_sweep_file("configs/sweeps/resnet_dataparallel.py", ["repeats=5"])


@pytest.mark.parametrize(
    "name, message",
    [
        ("mnist_pipeline", r"cannot be read \(No such file or directory\); name a readable sweep file"),
        ("no_such_experiment", r"cannot be read \(No such file or directory\); name a readable sweep file"),
        ("__init__", "not valid YAML at line 1, .*; correct the file"),
    ],
)
def test_a_python_file_without_a_grid_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep_file.read_sweep_file(f"configs/sweeps/{name}.py", [])


def test_a_refused_array_keeps_the_results_of_its_runs(tmp_path: Path, cache: Path) -> None:
    points = [{"batch": "32"}]
    file = write_grid(tmp_path, cache, points=points)
    fake = FakeSlurm(tmp_path)
    (run,) = write_interrupted_sweep(tmp_path, points, "cancelled")
    folder = RunFolder(tmp_path / "runs" / run)
    Result("cancelled", 130).write(folder)
    before = folder.result
    fake.define_command("sbatch", "echo refused >&2; exit 1")
    completed = sweep_on(fake, file, status=2)
    assert "refused" in completed.stderr, completed.stdout + completed.stderr
    assert before
    assert folder.result == before
    assert not list(folder.path.glob("attempts/*/result.json"))


def test_a_point_of_a_local_sweep_is_resumed_on_a_cluster_with_the_ranks_of_its_job(
    tmp_path: Path, cache: Path
) -> None:
    """With processes_per_node=0, which means two ranks on one host, the job would have too few ranks."""
    points = [{"optim.lr": "0.01"}]
    file = tmp_path / "rates.yaml"
    settings = {"data.name": "digits", "data.cache": str(cache), "runs": str(tmp_path / "runs")}
    file.write_text(yaml.safe_dump({"experiment": "ddp_multinode", "points": points, "settings": settings}))
    (run,) = write_interrupted_sweep(tmp_path, points, "cancelled", experiment="ddp_multinode")
    folder = RunFolder(tmp_path / "runs" / run)
    Result("cancelled", 130).write(folder)
    (folder.path / "code" / "slurm").mkdir(parents=True)
    shutil.copy(ROOT / "slurm" / "entry_points.json", folder.path / "code" / "slurm")
    completed = sweep_on(FakeSlurm(tmp_path), file)
    assert "1 node and 1 rank each" in completed.stdout
    assert read_config_file(folder.path / "submit/config.yaml")["processes_per_node"] == "1"


def test_a_stop_signal_while_a_point_is_prepared_starts_no_run(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder = sweep.make_point_folder

    def stop_meanwhile(*arguments: Any) -> RunFolder:
        os.kill(os.getpid(), signal.SIGTERM)
        return make_folder(*arguments)

    monkeypatch.setattr(sweep, "make_point_folder", stop_meanwhile)
    file = write_grid(tmp_path, cache, points=[{"batch": "32"}, {"batch": "64"}])
    status = 128 + signal.SIGTERM
    in_process_calls.call_verb("sweep", "--launch=local", "--", str(file), status=status)
    assert not list((tmp_path / "runs").glob("mnist_pipeline-*"))


@pytest.mark.slow
def test_a_point_that_its_run_refuses_is_missing_and_shows_the_error(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = write_grid(tmp_path, cache, points=[{"launch.device": "cuda"}])
    completed = in_process_calls.call_verb("sweep", "--launch=local", "--", str(file), status=1)
    assert "MISSING    launch.device=cuda" in completed.stdout
    assert "launch.device=cuda: no GPU is visible" in completed.stdout
    assert f"make compare SWEEP={tmp_path}/runs/sweeps/rates\n" in completed.stdout
    assert not list((tmp_path / "runs").glob("mnist_pipeline-*"))
    assert not (tmp_path / "runs/sweeps/rates").exists(), "the sweep can be repeated with other settings"


def test_a_point_that_is_still_stopping_is_skipped(
    tmp_path: Path, cache: Path, waiting_process: Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "STOPPING_SECONDS", 0.0)
    points = [{"batch": "32"}]
    file = write_grid(tmp_path, cache, points=points)
    (run,) = write_interrupted_sweep(tmp_path, points, "cancelled")
    folder = RunFolder(tmp_path / "runs" / run)
    folder.claim_attempt({"process": identify_process(waiting_process.pid)})
    Result("cancelled", 130).write(folder)
    completed = in_process_calls.call_verb("sweep", "--launch=local", "--", str(file))
    assert "skipped    batch=32: " in completed.stdout
    assert "is still running" in completed.stdout
