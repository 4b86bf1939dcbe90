"""make compare: runs of all kinds side by side, on the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.runs.compare import compare_page
from common.runs.folder import RunFolder
from slurm.reports import compare as compared
from slurm.reports import selection
from tests.harness import inside, warm
from tests.harness.made_runs import Made, write_six
from tests.harness.processes import environment
from tests.harness.registry import EXPERIMENTS
from tests.harness.warm import ROOT


def compare(runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return inside.run_verb("compare", f"--runs-folder={runs}", *words)


def as_json(runs: Path, *words: str) -> dict[str, Any]:
    done = compare(runs, "--json=1", *words)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def ends(answer: dict[str, Any]) -> list[str]:
    """The last four characters of the runs' ids."""
    return [run["run"][-4:] for run in answer["runs"]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of different length, one restarted, one running, one broken, one that never began."""
    return write_six(tmp_path_factory.mktemp("all") / "runs")


def test_the_table_holds_every_run_and_what_differs(made: Path) -> None:
    done = warm.execute(
        [sys.executable, "-m", "slurm", "compare", f"--runs-folder={made}"], env=environment(), real=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == compare(made).stdout
    head, first, *lines = done.stdout.splitlines()
    assert first == "mnist_pipeline:" and lines.pop(2) == "ddp_multinode:"
    assert [line.split()[1] for line in lines[:6]] == ["finished", "finished", "finished", "failed", "running", "lost"]
    assert "optim.lr" in head and "strategy" in head
    assert "momentum" not in head  # the same everywhere
    assert "data.cache" not in head
    assert any("FAILED: the loss is nan" in line for line in lines)
    assert lines[-1] == f"page: {(made / 'compare.html').as_uri()}"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_table_is_as_wide_as_the_terminal(made: Path, width: int) -> None:
    done = inside.run_verb("compare", f"--runs-folder={made}", COLUMNS=str(width))
    head, *lines = done.stdout.splitlines()
    table = [head, *(line for line in lines if line.split()[1:2] and line.split()[1] in ("finished", "failed"))]
    assert len(table) == 5 and max(map(len, table)) <= width
    assert head.split()[:2] == ["run", "state"] and (width < 80 or "accuracy" in head)
    whole = any(path.name in lines[1] for path in made.glob("mnist_pipeline-*"))
    assert whole == (width == 200) and ("the terminal is too narrow: " in done.stdout) == (width < 120)


def test_json_writes_no_page(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "runs", ignore=shutil.ignore_patterns("compare.html"))
    assert set(as_json(tmp_path / "runs")) == {"differing", "runs"}
    done = compare(tmp_path / "runs", "--json=1", f"--page={tmp_path / 'page.html'}")
    assert done.returncode == 2 and "JSON=1, which writes no page" in done.stderr
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_page_is_a_link(made: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    address = f"{made.as_uri()}/a%20page.html"
    shown = f"\033]8;;{address}\033\\{address}\033]8;;\033\\" if terminal else address
    assert compared.format_link(made / "a page.html") == shown


def test_a_result_of_a_newer_format_is_named_and_the_others_are_listed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    newer = Made("mnist_pipeline", 0, 20, result={"format": 3, "scores": {"test_accuracy": 0.5}}).write(runs)
    Made("mnist_pipeline", 1, 20).write(runs)
    told = "result.json has format 3, but this version reads format 2; use the version that wrote it"
    for done in (compare(runs), inside.run_verb("status", f"--runs-folder={runs}")):
        assert done.returncode == 0 and not done.stderr
        assert done.stdout.count(told) == 1 and "50.00%" not in done.stdout and "96.00%" in done.stdout, done.stdout
    shown, other = as_json(runs)["runs"]
    assert shown["detail"] == told and shown["test_accuracy"] != 0.5 and other["test_accuracy"] == 0.96
    assert told in (runs / "compare.html").read_text()
    (newer.path / "code" / "experiments").mkdir(parents=True)
    (newer.path / "code" / "experiments" / "mnist_pipeline.py").touch()
    done = inside.run_verb("rerun", "--", str(newer.path))
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_options_of_older_versions_are_taken_with_a_notice(made: Path) -> None:
    moved = f"note: --runs no longer sets the folder of the runs; use --runs-folder={made}\n"
    renamed = "note: the option --pick has been renamed to --runs\n"
    for words, notice in (((), moved), (("--pick=0003",), moved + renamed)):
        old = inside.run_verb("compare", f"--runs={made}", *words, "--json=1")
        assert old.stderr == notice and ends(json.loads(old.stdout)) == (["0003"] if words else ends(as_json(made)))
    old = inside.run_verb("status", f"--runs={made}")
    assert old.returncode == 0 and old.stderr == moved and "0003" in old.stdout


@pytest.mark.parametrize("name", [entry.name for entry in EXPERIMENTS if not entry.trains])
def test_a_measurement_has_no_samples_and_its_points_are_shown_beside_measurements_alone(
    name: str, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    numbers = {"timings": {"samples_per_second": 60.0}}
    folder = Made(name, 0, 4, result=numbers).write(runs)
    scores = json.loads((folder.path / "result.json").read_text())
    kept = {key: value for key, value in scores.items() if key not in ("scores", "data")}
    (folder.path / "result.json").write_text(json.dumps(kept))
    rows = [
        {"global_step": step, "samples": step, "time": float(step), "bytes": 4.0, "all_reduce float32 gloo": 0.1}
        for step in range(1, 5)
    ]
    folder.list_attempts()[-1].metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = compare(runs)
    assert "samples/s" not in alone.stdout and "all reduce float32 gloo" in (runs / "compare.html").read_text()
    assert "samples/s" in inside.run_verb("status", f"--runs-folder={runs}").stdout.splitlines()[0]
    assert (
        json.loads(inside.run_verb("status", f"--runs-folder={runs}", "--json=1").stdout)[0]["samples_per_second"] == 0
    )
    older = Made(name, 2, 4).write(runs)  # with settings for training that have no effect
    (older.path / "config.yaml").write_text((older.path / "config.yaml").read_text() + "data:\n  name: mnist\n")
    assert "the page omits" not in compare(runs, f"--name={name}").stdout
    Made("mnist_pipeline", 1, 20).write(runs)
    beside = compare(runs)
    page = (runs / "compare.html").read_text()
    assert "all reduce float32 gloo" not in page and "test loss" in page
    assert f"the page omits the measurements of {name} because other runs train" in beside.stdout


def test_the_cuts_of_stages_are_shown(tmp_path: Path) -> None:
    for number, stages in enumerate(([["conv1", "bn1"], ["layer2_1"], ["fc"]], [["all"]], None, "damaged")):
        measured = {} if stages is None else {"stages": stages}
        Made("mnist_pipeline", number, 20, result={"measured": measured}).write(tmp_path)
    assert [run["split_at"] for run in as_json(tmp_path)["runs"]] == ["layer2_1,fc", None, None, None]
    head, _, first, *_ = compare(tmp_path).stdout.splitlines()
    assert "  split at" in head and "layer2_1,fc" in first


def test_the_shards_at_the_end_are_shown(tmp_path: Path) -> None:
    for number, shards in enumerate(([[1, [64, 64]], [16, [96, 32]]], None, "damaged")):
        measured = {} if shards is None else {"shards": shards}
        settings = {} if shards is None else {"shards": "auto"}
        Made("ddp_multinode", number, 20, settings=settings, result={"measured": measured}).write(tmp_path)
    assert [run["shards"] for run in as_json(tmp_path)["runs"]] == ["96+32", None, None]
    shown = compare(tmp_path).stdout
    assert shown.count(" shards ") == 1 and " shard sizes" in shown, "the setting has a column, too"


def test_what_the_loss_of_ranks_cost_is_shown(tmp_path: Path) -> None:
    lost = {"ranks_lost": 2, "seconds_lost": 0.254, "steps_redone": 1, "generations": []}
    for number, measured in enumerate((lost, {})):
        Made("ddp_multinode", number, 20, result={"measured": measured}).write(tmp_path)
    told = [[run[name] for name in lost if name in run] for run in as_json(tmp_path)["runs"]]
    assert told == [[2, 0.254, 1], [None] * 3]
    done = inside.run_verb("compare", f"--runs-folder={tmp_path}", COLUMNS="120")
    head, _, first, *_ = done.stdout.splitlines()
    assert head.endswith("  ranks lost  seconds lost  steps redone") and first.split()[-3:] == ["2", "0.25", "1"]


def test_the_numbers_are_those_of_the_run_folders(made: Path) -> None:
    first, again, scaled, failed, running, lost = as_json(made)["runs"]
    assert (first["restarts"], again["restarts"]) == (0, 2)
    assert first["step"] == again["step"] == 1000
    assert first["test_accuracy"] == 0.96
    assert first["waiting"] == pytest.approx(0.3)  # the mean of the processes
    assert first["memory_mb"] == 300
    assert scaled["waiting"] == pytest.approx(0.02 * 0.5 / 0.05)
    assert scaled["efficiency"] == 0.9
    assert scaled["memory_mb"] == 500
    assert failed["state"] == "failed" and failed["step"] == 500
    assert running["state"] == "running" and running["samples_per_second"] > 0
    assert failed["test_accuracy"] is not None  # the last evaluation before the end
    assert lost["state"] == "lost" and lost["test_accuracy"] is None
    assert (again["experiment"], again["label"]) == ("mnist_pipeline", "0001 lr=0.05")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--runs=0003 0001",), ["0003", "0001"]),
        (("--name=mnist_pipeline",), ["0000", "0001"]),
        (("--last=2",), ["0004", "0005"]),
        (("--name=ddp_multinode", "--last=3"), ["0003", "0004", "0005"]),
        (("--where=strategy=fsdp",), ["0003"]),
        (("--where=lr>0.04",), ["0001", "0004"]),
        (("--where=optim.lr<=0.02 batch=64 strategy!=fsdp",), ["0002", "0005"]),
        (("--where=lr=5e-2",), ["0001"]),
        (("--where=experiment=mnist_pipeline", "--last=1"), ["0001"]),
        (("--sweep=grid",), ["0004", "0002"]),
    ],
)
def test_runs_are_chosen(made: Path, words: tuple[str, ...], found: list[str]) -> None:
    ids = [f"{path.name}" for number in ("0004", "0002") for path in made.glob(f"*-{number}")]
    (made / "sweeps" / "grid").mkdir(parents=True, exist_ok=True)
    cells: list[dict[str, Any]] = [{"values": {}, "repeat": 0, "run": one} for one in [*ids, ids[0], None, "gone"]]
    (made / "sweeps" / "grid" / "sweep.json").write_text(json.dumps({"experiment": "ddp_multinode", "cells": cells}))
    assert ends(as_json(made, *words)) == found


def test_runs_are_chosen_by_lists(tmp_path: Path) -> None:
    for number, split in enumerate(("[fc2]", "[fc3]", "[]")):
        Made("mnist_pipeline", number, 10, settings={"split": split, "wandb.tags": "[a,b]"}).write(tmp_path)
    for where, found in (
        ("split=[fc2]", ["0000"]),
        ("split=fc3 'wandb.tags=[a, b]'", ["0001"]),
        ("split!=[]", ["0000", "0001"]),
    ):
        assert ends(as_json(tmp_path, f"--where={where}")) == found
    assert "[fc2]" in compare(tmp_path).stdout


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--runs=nosuch",), "no such run folder"),
        (("--runs='",), "RUNS="),
        (("--name=nosuch",), "no matching run; found runs of ddp_multinode, mnist_pipeline"),
        (("--last=0",), "LAST must be"),
        (("--last=-3",), "LAST must be"),
        (("--where=strategy",), "is not a condition"),
        (("--where=strateg=ddp",), "did you mean strategy?"),
        (("--where=lr>high",), "is not a number"),
        (("--where=strategy=ddp batch=3",), "no matching run (6 runs checked)"),
        (("--sweep=nosuch",), "no such sweep"),
        (("--json=yes",), "JSON must be 0 or 1"),
    ],
)
def test_mistakes_are_answered(made: Path, words: tuple[str, ...], part: str) -> None:
    done = compare(made, *words)
    assert done.returncode == 2
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")


@pytest.mark.parametrize("below", ["", "/x.html", "/a/b.html"])
def test_a_page_that_cannot_be_written_takes_no_table_away(made: Path, tmp_path: Path, below: str) -> None:
    place = tmp_path / "there"
    place.touch() if below else place.mkdir()
    done = compare(made, f"--page={place}{below}")
    assert done.returncode == 2 and len(done.stdout.splitlines()) > 6, done.stdout
    assert str(place) in done.stderr and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
    assert not place.is_dir() or not list(place.iterdir())


def test_a_page_in_a_folder_that_is_not_there_is_refused(made: Path, tmp_path: Path) -> None:
    done = compare(made, f"--page={tmp_path}/new/dir/page.html")
    assert done.returncode == 2 and f"the folder {tmp_path}/new/dir does not exist; create it" in done.stderr
    assert not (tmp_path / "new").exists()


def test_only_a_page_of_its_own_is_written_over(made: Path, tmp_path: Path) -> None:
    for name, text in (("README.md", "# mine\n"), ("empty", "")):
        (tmp_path / name).write_text(text)
        done = compare(made, f"--page={tmp_path / name}")
        assert done.returncode == 2 and "was not written by make compare" in done.stderr
        assert "Traceback" not in done.stderr
        assert (tmp_path / name).read_text() == text
    for _ in range(2):
        done = compare(made, f"--page={tmp_path / 'page.html'}")
        assert done.returncode == 0, done.stderr


def test_two_runs_whose_ids_end_alike_are_two_in_the_page(tmp_path: Path) -> None:
    for name in ("mnist_pipeline", "ddp_multinode"):
        Made(name, 7, 10, result={"measured": {"idle_share": [0.2]}}).write(tmp_path)
    runs, _ = compared.load_runs(selection.list_all_runs(tmp_path))
    page = compare_page.render_page([compared.make_compared_run(run, ["waiting"], tmp_path) for run in runs], [], [])
    rows = re.findall(r'<tr class="run" data-run="(\d)".*? title="([^"]+)"', page)
    assert rows == [(str(i), run.folder.path.name) for i, run in enumerate(runs)]
    drawn = json.loads(re.findall(r'type="application/json">(.*?)</script>', page)[0])["runs"]
    assert {run["name"] for run in drawn} == {"ddp_multinode 0007", "mnist_pipeline 0007"}


def test_text_of_a_run_folder_is_escaped_in_the_page(made: Path) -> None:
    (own, *_), _ = compared.load_runs(selection.list_all_runs(made))
    bad = "<i>{{script}}</i></script>\"'"
    own.curves.tests[bad] = own.curves.tests["test_loss"]
    own.settings["optim.lr"] = own.label = bad
    picture = dataclasses.replace(
        compared.make_compared_run(own, ["step"], made), state=bad, detail=bad, experiment=bad, links={bad: bad}
    )
    page = compare_page.render_page([picture, dataclasses.replace(picture, experiment="b")], ["optim.lr"], ["optim.lr"])
    assert "<i>" not in page and page.count("{{script}}") > 10
    assert page.count("<script") == page.count("</script>") == 2


def test_the_newest_starts_settings_count(tmp_path: Path) -> None:
    folder = Made("ddp_multinode", 1, 20, attempts=2, settings={"optim.lr": "0.1"}).write(tmp_path / "runs")
    Made("ddp_multinode", 2, 20, settings={"optim.lr": "0.1"}).write(tmp_path / "runs")
    first, second = folder.list_attempts()
    (second.attempt_folder / "changed.json").write_text('{"optim.lr": ["0.1", "0.05"], "clip": 3}')
    answer = as_json(tmp_path / "runs")
    assert [run["settings"] for run in answer["runs"]] == [{"optim.lr": "0.05"}, {"optim.lr": "0.1"}]
    assert ends(as_json(tmp_path / "runs", "--where=lr<0.07")) == ["0001"]
    shutil.move(second.attempt_folder / "changed.json", first.attempt_folder)  # the second start took it back
    assert as_json(tmp_path / "runs")["differing"] == []


def test_a_restart_is_no_dip_in_the_throughput(tmp_path: Path) -> None:
    folder = Made(steps=60, attempts=2).write(tmp_path)
    later = folder.list_attempts()[1].metrics_file
    waited = [row | {"time": row["time"] + 60} for row in folder.list_attempts()[1].read_attempt_rows()]
    later.write_text("".join(json.dumps(row) + "\n" for row in waited))
    low = compared.RunFacts.from_folder(folder).curves.speed.low
    assert min(low) > 0.5 * max(low)


def test_an_ending_of_two_runs_is_refused(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("mnist_pipeline", "ddp_multinode"):
        Made(name, 7, 10).write(runs)
    done = compare(runs, "--runs=0007")
    assert done.returncode == 2 and "mnist_pipeline-" in done.stderr and "ddp_multinode-" in done.stderr


def test_without_runs_there_is_a_remedy(tmp_path: Path) -> None:
    done = compare(tmp_path / "runs")
    assert done.returncode == 2 and "make exp NAME=" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_damaged_files_do_not_hide_the_others(made: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(made, runs)
    _, cut, odd, *_ = sorted(runs.glob("*-*/"), key=lambda path: path.name[-4:])
    metrics = RunFolder(cut).list_attempts()[-1].metrics_file
    metrics.write_text(
        metrics.read_text()[:-7] + '\n[1]\n{"loss": 1}\n{"global_step": "x", "samples": 1, "time": 1, "loss": 1}\n'
    )
    (odd / "config.yaml").write_text("a: [")
    (odd / "result.json").write_text('{"state": "fini')
    assert len(as_json(runs)["runs"]) == 6


def test_status_is_told_to_machines(made: Path) -> None:
    every = json.loads(inside.run_verb("status", f"--runs-folder={made}", "--json=1").stdout)
    assert {one["run"] for one in every} == {path.parent.name for path in made.glob("*/config.yaml")}
    (broken,) = (one for one in every if one["run"].endswith("-0003"))
    assert (broken["state"], broken["step"], broken["restarts"]) == ("failed", 500, 0)
    alone = inside.run_verb("status", f"--runs-folder={made}", "--json=1", "--", broken["run"])
    assert alone.returncode == 1
    assert json.loads(alone.stdout)[0]["detail"] == "the loss is nan"


def test_it_needs_no_torch() -> None:
    program = "import sys\nfrom slurm.reports import compare, prune_runs, wandb_dashboard, wandb_sync\n"
    program += "print('torch' in sys.modules, 'wandb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
