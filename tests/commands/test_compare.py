"""make compare: runs of all kinds side by side, on the terminal, in a page and as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from common.runs.compare import compare_page
from common.runs.compare.compare_page import LoggedImage
from common.runs.folder import RunFolder, read_json
from slurm.reports import compare as compared
from slurm.reports import selection
from slurm.reports.compare_content import make_compared_run
from slurm.reports.compared_runs import RunFacts, read_groups
from tests.harness.commands import in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import execute_verb
from tests.harness.experiments.registry import MEASUREMENTS
from tests.harness.repository import ROOT
from tests.harness.runs.synthetic_runs import SyntheticRun, write_example_runs, write_rows


def compare(runs: Path, *arguments: str, status: int = 0, **env: str) -> Completed:
    return in_process_calls.call_verb("compare", f"--runs-folder={runs}", *arguments, cwd=ROOT, status=status, **env)


def as_json(runs: Path, *arguments: str) -> dict[str, Any]:
    completed = compare(runs, "--json=1", *arguments)
    return dict(json.loads(completed.stdout))


def ends(answer: dict[str, Any]) -> list[str]:
    """Return the last four characters of the ids of the runs."""
    return [run["run"][-4:] for run in answer["runs"]]


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six runs: of different lengths, restarted, running, failed, and one that never started."""
    return write_example_runs(tmp_path_factory.mktemp("all") / "runs")


def test_the_table_has_every_run_and_the_differing_settings(runs_folder: Path) -> None:
    completed = execute_verb("compare", f"--runs-folder={runs_folder}", real_process=True, status=0)
    assert completed.stdout == compare(runs_folder).stdout
    head, first, *lines = completed.stdout.splitlines()
    assert first == "mnist_pipeline:"
    assert lines.pop(2) == "ddp_multinode:"
    assert [line.split()[1] for line in lines[:6]] == ["finished", "finished", "finished", "failed", "running", "lost"]
    assert "learning rate" in head
    assert "strategy" in head
    assert "momentum" not in head, "all runs have the same momentum"
    assert "data.cache" not in head
    assert any("FAILED: the loss is nan" in line for line in lines)
    assert lines[-1] == f"page: {(runs_folder / 'compare.html').as_uri()}"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_table_is_as_wide_as_the_terminal(runs_folder: Path, width: int) -> None:
    completed = compare(runs_folder, COLUMNS=str(width))
    head, *lines = completed.stdout.splitlines()
    rows = [line for line in lines if re.match(r"\S+ +(finished|failed)\b", line.strip())]
    assert len(rows) == 4
    assert max(len(line) for line in [head, *rows]) <= width
    assert head.split()[:2] == ["run", "state"]
    assert width < 80 or "accuracy" in head
    has_full_id = any(path.name in lines[1] for path in runs_folder.glob("mnist_pipeline-*"))
    assert has_full_id == (width == 200)
    assert ("the terminal is too narrow: " in completed.stdout) == (width < 200)


def test_json_writes_no_page(runs_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(runs_folder, tmp_path / "runs", ignore=shutil.ignore_patterns("compare.html"))
    assert set(as_json(tmp_path / "runs")) == {"differing", "runs"}
    completed = compare(tmp_path / "runs", "--json=1", f"--page={tmp_path / 'page.html'}", status=2)
    assert "JSON=1, which writes no page" in completed.stderr
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_page_is_a_link(runs_folder: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    address = f"{runs_folder.as_uri()}/a%20page.html"
    expected = f"\033]8;;{address}\033\\{address}\033]8;;\033\\" if terminal else address
    assert compared.format_link(runs_folder / "a page.html") == expected


def test_a_result_of_a_newer_format_is_reported_and_other_runs_are_listed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    newer = SyntheticRun("mnist_pipeline", 0, 20, result={"format": 3, "scores": {"test_accuracy": 0.5}}).write(runs)
    SyntheticRun("mnist_pipeline", 1, 20).write(runs)
    message = "result.json has format 3, but this version reads format 2; use the version that wrote it"
    for completed in (compare(runs), in_process_calls.call_verb("status", f"--runs-folder={runs}")):
        assert not completed.stderr
        assert completed.stdout.count(message) == 1, completed.stdout
        assert "50.00%" not in completed.stdout, completed.stdout
        assert "96.00%" in completed.stdout, completed.stdout
    unreadable, readable = as_json(runs)["runs"]
    assert unreadable["detail"] == message
    assert unreadable["test_accuracy"] != 0.5
    assert readable["test_accuracy"] == 0.96
    assert message in (runs / "compare.html").read_text()
    (newer.path / "code/experiments").mkdir(parents=True)
    (newer.path / "code/experiments/mnist_pipeline.py").touch()
    completed = in_process_calls.call_verb("rerun", "--", str(newer.path), status=2)
    assert message in completed.stderr
    assert len(completed.stderr.splitlines()) == 1


def test_the_options_of_older_versions_are_accepted_with_a_notice(runs_folder: Path) -> None:
    moved = f"note: --runs no longer sets the folder of the runs; use --runs-folder={runs_folder}\n"
    renamed = "note: the option --pick has been renamed to --runs\n"
    completed = in_process_calls.call_verb("compare", f"--runs={runs_folder}", "--json=1")
    assert completed.stderr == moved
    assert ends(json.loads(completed.stdout)) == ends(as_json(runs_folder))
    completed = in_process_calls.call_verb("compare", f"--runs={runs_folder}", "--pick=0003", "--json=1")
    assert completed.stderr == moved + renamed
    assert ends(json.loads(completed.stdout)) == ["0003"]
    completed = in_process_calls.call_verb("status", f"--runs={runs_folder}")
    assert completed.stderr == moved
    assert "0003" in completed.stdout


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_points_of_a_measurement_are_compared_with_measurements_only(name: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    numbers = {"timings": {"samples_per_second": 60.0}}
    folder = SyntheticRun(name, 0, 4, result=numbers).write(runs)
    scores = read_json(folder.path / "result.json")
    scores.pop("scores", None)
    scores.pop("data", None)
    (folder.path / "result.json").write_text(json.dumps(scores))
    measured = {"bytes": 4.0, "all_reduce float32 gloo": 0.1}
    rows = [{"global_step": step, "samples": step, "time": float(step)} | measured for step in range(1, 5)]
    write_rows(folder.list_attempts()[-1], rows)
    assert "samples/s" not in compare(runs).stdout
    assert "all reduce float32 gloo" in (runs / "compare.html").read_text()
    assert "samples/s" in in_process_calls.call_verb("status", f"--runs-folder={runs}").stdout.splitlines()[0]
    (status,) = json.loads(in_process_calls.call_verb("status", f"--runs-folder={runs}", "--json=1").stdout)
    assert status["samples_per_second"] == 0
    older = SyntheticRun(name, 2, 4).write(runs)  # with settings for training that have no effect
    (older.path / "config.yaml").write_text((older.path / "config.yaml").read_text() + "data:\n  name: mnist\n")
    assert "the page omits" not in compare(runs, f"--name={name}").stdout
    SyntheticRun("mnist_pipeline", 1, 20).write(runs)
    output = compare(runs).stdout
    page = (runs / "compare.html").read_text()
    assert "all reduce float32 gloo" not in page
    assert "test loss" in page
    assert f"the page omits the measurements of {name} because other runs train" in output


def test_the_cuts_of_stages_are_shown(tmp_path: Path) -> None:
    for number, stages in enumerate(([["conv1", "bn1"], ["layer2_1"], ["fc"]], [["all"]], None, "damaged")):
        measured = {} if stages is None else {"stages": stages}
        SyntheticRun("mnist_pipeline", number, 20, result={"measured": measured}).write(tmp_path)
    assert [run["split_at"] for run in as_json(tmp_path)["runs"]] == ["layer2_1,fc", None, None, None]
    head, _, first, *_ = compare(tmp_path, COLUMNS="200").stdout.splitlines()
    assert "  split at" in head
    assert "layer2_1,fc" in first


def test_the_shards_at_the_end_are_shown(tmp_path: Path) -> None:
    for number, shards in enumerate(([[1, [64, 64]], [16, [96, 32]]], None, "damaged")):
        measured = {} if shards is None else {"shards": shards}
        settings = {} if shards is None else {"shards": "auto"}
        SyntheticRun("ddp_multinode", number, 20, settings=settings, result={"measured": measured}).write(tmp_path)
    assert [run["shards"] for run in as_json(tmp_path)["runs"]] == ["96+32", None, None]
    table = compare(tmp_path).stdout
    assert table.count(" shards ") == 1
    assert " shard sizes" in table, "the setting has a column"


def test_the_cost_of_lost_ranks_is_shown(tmp_path: Path) -> None:
    lost = {"ranks_lost": 2, "seconds_lost": 0.254, "steps_redone": 1, "generations": []}
    for number, measured in enumerate((lost, {})):
        SyntheticRun("ddp_multinode", number, 20, result={"measured": measured}).write(tmp_path)
    first_run, second_run = as_json(tmp_path)["runs"]
    for name in ("ranks_lost", "seconds_lost", "steps_redone"):
        assert first_run[name] == lost[name]
        assert second_run[name] is None
    head, _, first, *_ = compare(tmp_path, COLUMNS="120").stdout.splitlines()
    assert head.endswith("  ranks lost  seconds lost  steps redone"), head
    assert first.split()[-3:] == ["2", "0.25", "1"]


def test_the_numbers_equal_those_of_the_run_folders(runs_folder: Path) -> None:
    first, again, scaled, failed, running, lost = as_json(runs_folder)["runs"]
    assert first["restarts"] == 0
    assert again["restarts"] == 2
    assert first["step"] == 1000
    assert again["step"] == 1000
    assert first["test_accuracy"] == 0.96
    assert first["waiting"] == pytest.approx(0.3)  # the mean of the processes
    assert first["memory_mb"] == 300
    assert scaled["waiting"] == pytest.approx(0.02 * 0.5 / 0.05)
    assert scaled["efficiency"] == 0.9
    assert scaled["memory_mb"] == 500
    assert failed["state"] == "failed"
    assert failed["step"] == 500
    assert running["state"] == "running"
    assert running["samples_per_second"] > 0
    assert failed["test_accuracy"] is not None  # the last evaluation before the end
    assert lost["state"] == "lost"
    assert lost["test_accuracy"] is None
    assert again["experiment"] == "mnist_pipeline"
    assert again["label"] == "0001 lr=0.05"


def test_the_loss_is_that_of_the_last_step(runs_folder: Path) -> None:
    """As in the status. The last point of a curve is the mean of several steps."""
    statuses = json.loads(in_process_calls.call_verb("status", f"--runs-folder={runs_folder}", "--json=1").stdout)
    losses = {status["run"]: status["loss"] for status in statuses}
    assert {run["run"]: run["loss"] for run in as_json(runs_folder)["runs"]} == losses


SELECTIONS = {
    "'--runs=0003 0001'": "0003 0001",
    "--name=mnist_pipeline": "0000 0001",
    "--last=2": "0004 0005",
    "--name=ddp_multinode --last=3": "0003 0004 0005",
    "--where=strategy=fsdp": "0003",
    "'--where=lr>0.04'": "0001 0004",
    "'--where=optim.lr<=0.02 batch=64 strategy!=fsdp'": "0002 0005",
    "--where=lr=5e-2": "0001",
    "--where=experiment=mnist_pipeline --last=1": "0001",
    "--sweep=grid": "0004 0002",
    "--where=test_accuracy>=0.96": "0000 0001 0002",
    "--where=test_accuracy<0.96": "0003 0004",  # not finished: the newest evaluation counts
    "'--where=state=failed test_loss<1'": "0003",
    "'--where=duration<=20 step>0 strategy=ddp'": "0002 0004",
    "--where=learning_rate>0.04": "0001 0004",
    "'--where=loss<0.4'": "0000 0001 0002",  # the setting `loss` is not a number
    "--sort=state --name=ddp_multinode": "0003 0002 0005 0004",
    "--sort=-lr --name=mnist_pipeline": "0001 0000",
    "--sort=learning_rate --name=mnist_pipeline": "0000 0001",
    "'--sort=final loss'": "0002 0001 0000 0004 0003 0005",
    "'--sort=-test_accuracy' --last=4": "0002 0004 0003 0005",
    "--sort=strategy --name=ddp_multinode": "0002 0004 0005 0003",
}


@pytest.mark.parametrize("arguments, expected", SELECTIONS.items())
def test_runs_are_chosen(runs_folder: Path, arguments: str, expected: str) -> None:
    first, second = (next(runs_folder.glob(f"*-{number}")).name for number in ("0004", "0002"))
    (runs_folder / "sweeps/grid").mkdir(parents=True, exist_ok=True)
    run_ids = (first, second, first, None, "gone")
    cells: list[dict[str, Any]] = [{"values": {}, "repeat": 0, "run": run_id} for run_id in run_ids]
    (runs_folder / "sweeps/grid/sweep.json").write_text(json.dumps({"experiment": "ddp_multinode", "cells": cells}))
    assert ends(as_json(runs_folder, *shlex.split(arguments))) == expected.split()


def test_runs_are_chosen_by_lists(tmp_path: Path) -> None:
    for number, split in enumerate(("[fc2]", "[fc3]", "[]")):
        SyntheticRun("mnist_pipeline", number, 10, settings={"split": split, "wandb.tags": "[a,b]"}).write(tmp_path)
    for condition, expected in (
        ("split=[fc2]", ["0000"]),
        ("split=fc3 'wandb.tags=[a, b]'", ["0001"]),
        ("split!=[]", ["0000", "0001"]),
    ):
        assert ends(as_json(tmp_path, f"--where={condition}")) == expected
    assert "[fc2]" in compare(tmp_path).stdout


INVALID_ARGUMENTS = {
    "--runs=nosuch": "no such run folder",
    "--runs='": "RUNS=",
    "--name=nosuch": "no matching run; found runs of ddp_multinode, mnist_pipeline",
    "--last=0": "LAST must be",
    "--last=-3": "LAST must be",
    "--where=strategy": "is not a condition",
    "--where=seed!==1": "!== is not a comparison",
    "--where=seed=>1": "=> is not a comparison; use =, !=, <, <=, > or >=",
    "--where=strateg=ddp": "did you mean strategy?",
    "--where=lr>high": "is not a number",
    "--where=strategy=ddp batch=3": "no matching run (6 runs checked)",
    "--sweep=nosuch": "no such sweep",
    "--json=yes": "JSON must be 0 or 1",
    "--where=test_acuracy>=0.9": "did you mean test_accuracy?",
    "--where=test_accuracy>1": "no matching run (6 runs checked)",
    "--where=test_accuracy>high": "'high' is not a number",
    "--sort=nosuch": "use, for example, test_accuracy, -loss, start, optim.lr",
    "--sort=-test_acuracy": "did you mean test_accuracy?",
    "--group=batch": "GROUP must be seed",
    "--group=seed --json=1": "GROUP cannot be combined with JSON=1",
    "--follow=1 --json=1": "FOLLOW cannot be combined with JSON=1",
    "--follow=yes": "FOLLOW must be 0 or 1",
}


@pytest.mark.parametrize("arguments, part", INVALID_ARGUMENTS.items())
def test_invalid_arguments_are_refused(runs_folder: Path, arguments: str, part: str) -> None:
    options = [arguments] if "'" in arguments or "strategy" in arguments else arguments.split()
    (line,) = compare(runs_folder, *options, status=2).stderr.splitlines()
    assert part in line


@pytest.mark.parametrize("suffix", ["", "/x.html", "/a/b.html"])
def test_the_table_is_printed_if_the_page_cannot_be_written(runs_folder: Path, tmp_path: Path, suffix: str) -> None:
    place = tmp_path / "there"
    if suffix:
        place.touch()
    else:
        place.mkdir()
    completed = compare(runs_folder, f"--page={place}{suffix}", status=2)
    assert len(completed.stdout.splitlines()) > 6, completed.stdout
    (line,) = completed.stderr.splitlines()
    assert str(place) in line
    assert not place.is_dir() or not list(place.iterdir())


def test_a_page_in_a_missing_folder_is_refused(runs_folder: Path, tmp_path: Path) -> None:
    completed = compare(runs_folder, f"--page={tmp_path}/new/dir/page.html", status=2)
    assert f"the folder {tmp_path}/new/dir does not exist; create it" in completed.stderr
    assert not (tmp_path / "new").exists()


def test_only_pages_of_make_compare_are_overwritten(runs_folder: Path, tmp_path: Path) -> None:
    for name, text in (("README.md", "# mine\n"), ("empty", "")):
        (tmp_path / name).write_text(text)
        completed = compare(runs_folder, f"--page={tmp_path / name}", status=2)
        assert "was not written by make compare" in completed.stderr
        assert (tmp_path / name).read_text() == text
    for _ in range(2):
        completed = compare(runs_folder, f"--page={tmp_path / 'page.html'}")


def test_two_runs_with_the_same_id_suffix_are_separate_in_the_page(tmp_path: Path) -> None:
    for name in ("mnist_pipeline", "ddp_multinode"):
        SyntheticRun(name, 7, 10, result={"measured": {"idle_share": [0.2]}}).write(tmp_path)
    groups = read_groups(selection.list_all_runs(tmp_path), by_seed=False)
    page = compare_page.render_page([make_compared_run(group, ["waiting"], tmp_path) for group in groups], [], [], [])
    rows = re.findall(r'<tr class="run" data-run="(\d)".*? title="([^"]+)"', page)
    assert rows == [(str(i), group.runs[0].folder.path.name) for i, group in enumerate(groups)]
    data = json.loads(re.findall(r'type="application/json">(.*?)</script>', page)[0])
    assert {run["name"] for run in data["runs"]} == {"ddp_multinode 0007", "mnist_pipeline 0007"}


def test_text_of_a_run_folder_is_escaped_in_the_page(runs_folder: Path) -> None:
    group = read_groups(selection.list_all_runs(runs_folder), by_seed=False)[0]
    facts = group.runs[0]
    markup = "<i>{{script}}</i></script>\"'"
    facts.curves.tests[markup] = facts.curves.tests["test_loss"]
    facts.settings["optim.lr"] = markup
    group.label = markup
    run = make_compared_run(group, ["step"], runs_folder)
    run = dataclasses.replace(run, state=markup, detail=markup, experiment=markup, links={markup: markup})
    run = dataclasses.replace(run, short_id=markup, images=[LoggedImage(markup, 1, markup)])
    page = compare_page.render_page([run, dataclasses.replace(run, experiment="b")], ["optim.lr"], [], ["optim.lr"])
    assert "<i>" not in page
    assert page.count("{{script}}") > 10
    assert page.count("<script") == 2
    assert page.count("</script>") == 2


def test_the_settings_of_the_newest_attempt_count(tmp_path: Path) -> None:
    folder = SyntheticRun("ddp_multinode", 1, 20, attempts=2, settings={"optim.lr": "0.1"}).write(tmp_path / "runs")
    SyntheticRun("ddp_multinode", 2, 20, settings={"optim.lr": "0.1"}).write(tmp_path / "runs")
    first, second = folder.list_attempts()
    (second.attempt_folder / "changed.json").write_text('{"optim.lr": ["0.1", "0.05"], "clip": 3}')
    answer = as_json(tmp_path / "runs")
    assert [run["settings"] for run in answer["runs"]] == [{"optim.lr": "0.05"}, {"optim.lr": "0.1"}]
    assert ends(as_json(tmp_path / "runs", "--where=lr<0.07")) == ["0001"]
    shutil.move(second.attempt_folder / "changed.json", first.attempt_folder)  # the second start took it back
    assert as_json(tmp_path / "runs")["differing"] == []


def test_a_restart_is_no_dip_in_the_throughput(tmp_path: Path) -> None:
    folder = SyntheticRun(steps=60, attempts=2).write(tmp_path)
    later = folder.list_attempts()[1]
    write_rows(later, [row | {"time": row["time"] + 60} for row in later.read_attempt_rows()])
    low = RunFacts.from_folder(folder).curves.steps["samples_per_second"].low
    assert min(low) > 0.5 * max(low)


def test_an_id_suffix_of_two_runs_is_refused(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("mnist_pipeline", "ddp_multinode"):
        SyntheticRun(name, 7, 10).write(runs)
    error = compare(runs, "--runs=0007", status=2).stderr
    assert "mnist_pipeline-" in error
    assert "ddp_multinode-" in error


def test_a_missing_runs_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    completed = compare(tmp_path / "runs", status=2)
    assert "make exp NAME=" in completed.stderr
    assert not (tmp_path / "runs").exists()


def test_damaged_files_do_not_hide_other_runs(runs_folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(runs_folder, runs)
    _, cut, odd, *_ = sorted(runs.glob("*-*/"), key=lambda path: path.name[-4:])
    metrics = RunFolder(cut).list_attempts()[-1].metrics_file
    damaged_lines = '\n[1]\n{"loss": 1}\n{"global_step": "x", "samples": 1, "time": 1, "loss": 1}\n'
    metrics.write_text(metrics.read_text()[:-7] + damaged_lines)
    (odd / "config.yaml").write_text("a: [")
    (odd / "result.json").write_text('{"state": "fini')
    assert len(as_json(runs)["runs"]) == 6


def test_the_status_is_available_as_json(runs_folder: Path) -> None:
    every = json.loads(in_process_calls.call_verb("status", f"--runs-folder={runs_folder}", "--json=1").stdout)
    assert {status["run"] for status in every} == {path.parent.name for path in runs_folder.glob("*/config.yaml")}
    (broken,) = (status for status in every if status["run"].endswith("-0003"))
    assert broken["state"] == "failed"
    assert broken["step"] == 500
    assert broken["restarts"] == 0
    completed = in_process_calls.call_verb(
        "status", f"--runs-folder={runs_folder}", "--json=1", "--", broken["run"], status=1
    )
    assert json.loads(completed.stdout)[0]["detail"] == "the loss is nan"
