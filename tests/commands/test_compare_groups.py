"""make compare with seeds, images and active runs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import RunFolder, write_json
from slurm.reports import compare as compared
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import WAIT_TIMEOUT, make_environment, wait_until
from tests.harness.repository import ROOT
from tests.harness.runs.synthetic_runs import SyntheticRun

RELOADS = re.compile('"reload":5')


def read_page_data(runs: Path) -> dict[str, Any]:
    """Return the data of the charts of runs/compare.html."""
    (text,) = re.findall(r'type="application/json">(.*?)</script>', (runs / "compare.html").read_text())
    return dict(json.loads(text))


def test_runs_that_differ_only_in_their_seed_share_a_row_and_a_curve(tmp_path: Path) -> None:
    points = []
    for number, (seed, rate) in enumerate((("0", "0.1"), ("1", "0.1"), ("2", "0.1"), ("0", "0.2"))):
        result = {"scores": {"test_accuracy": 0.9 + 0.01 * number}}
        settings = {"seed": seed, "optim.lr": rate}
        run = SyntheticRun("mnist_pipeline", number, 40, settings=settings, result=result).write(tmp_path)
        points.append({"values": {"optim.lr": rate}, "repeat": int(seed), "run": run.path.name})
    SyntheticRun("ddp_multinode", 4, 40).write(tmp_path)  # not a run of the sweep
    (tmp_path / "sweeps/rates").mkdir(parents=True)
    write_json(tmp_path / "sweeps/rates/sweep.json", {"experiment": "mnist_pipeline", "cells": points})
    arguments = (f"--runs-folder={tmp_path}", "--sweep=rates", "--group=seed")
    completed = in_process_calls.call_verb("compare", *arguments, COLUMNS="300")
    head, _, first, second, *_ = completed.stdout.splitlines()
    assert "learning rate" in head
    assert "-0000 +2  finished" in first
    assert "91.00% [90.00%..92.00%]" in first
    assert "93.00% " in second
    data = read_page_data(tmp_path)
    assert [run["name"] for run in data["runs"]] == ["0000 lr=0.1 (3 seeds)", "0003 lr=0.2"]
    assert "<title>4 runs in 2 groups compared</title>" in (tmp_path / "compare.html").read_text()
    mean, single = data["charts"][0]["curves"]
    values = [read_losses(tmp_path, number)[10] for number in range(3)]
    assert mean["y"][10] == pytest.approx(sum(values) / 3, rel=1e-4)
    assert (mean["low"][10], mean["high"][10]) == pytest.approx((min(values), max(values)), rel=1e-4)
    assert "low" not in single


def read_losses(runs: Path, number: int) -> list[float]:
    """Return the losses of the steps of a run."""
    (path,) = runs.glob(f"*-{number:04x}")
    return [row["loss"] for row in RunFolder(path).read_rows() if "loss" in row]


def test_groups_show_different_states_and_settings(tmp_path: Path) -> None:
    for seed, state in enumerate(("finished", "failed", "finished")):
        SyntheticRun("mnist_pipeline", seed, 40, state=state, settings={"seed": str(seed)}).write(tmp_path)
    completed = in_process_calls.call_verb("compare", f"--runs-folder={tmp_path}", "--group=seed", COLUMNS="300")
    assert "2 finished, 1 failed" in completed.stdout
    assert "-0001 FAILED: the loss is nan" in completed.stdout
    page = (tmp_path / "compare.html").read_text()
    assert "0001: the loss is nan" in page
    assert page.count(">0001: folder</a>") == 1


def test_labels_contain_the_name_that_all_runs_of_a_row_share(tmp_path: Path) -> None:
    names = ("wide", "wide", "first", "second")
    rates = ("0.1", "0.1", "0.2", "0.2")
    for number, (name, rate) in enumerate(zip(names, rates, strict=True)):
        settings = {"seed": str(number), "optim.lr": rate, "run.name": name}
        SyntheticRun("mnist_pipeline", number, 40, settings=settings).write(tmp_path)
    in_process_calls.call_verb("compare", f"--runs-folder={tmp_path}", "--group=seed")
    labels = [run["name"] for run in read_page_data(tmp_path)["runs"]]
    assert labels == ["0000 wide lr=0.1 (2 seeds)", "0002 lr=0.2 (2 seeds)"]


def test_images_of_steps_that_count_are_shown(tmp_path: Path) -> None:
    folder = SyntheticRun("mnist_pipeline", 0, 40, attempts=2).write(tmp_path)  # the second attempt resumes at step 15
    for attempt, steps in zip(folder.list_attempts(), ((10, 18), (18, 30)), strict=True):
        media = attempt.attempt_folder / "media"
        media.mkdir()
        lines = ["damaged", "[]", '{"kind": "histogram", "global_step": 1, "name": "weights", "file": "media/x.json"}']
        for step in steps:
            (media / f"digit-{step}.png").touch()
            entry = {"global_step": step, "name": "digit", "kind": "image", "file": f"media/digit-{step}.png"}
            lines.append(json.dumps(entry))
        lines.append(json.dumps(entry | {"file": "../../../../../../etc/passwd"}))
        (attempt.attempt_folder / "media.jsonl").write_text("\n".join(lines))
    in_process_calls.call_verb("compare", f"--runs-folder={tmp_path}")
    images = re.findall('<img src="([^"]+)"', (tmp_path / "compare.html").read_text())
    attempts = f"{folder.path.name}/attempts"
    expected = ["0001/media/digit-10.png", "0002/media/digit-18.png", "0002/media/digit-30.png"]
    assert images == [f"{attempts}/{file}" for file in expected]
    for image in images:
        assert (tmp_path / image).exists()


def test_the_page_is_updated_until_all_runs_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared, "RELOAD_SECONDS", 0.05)
    folder = SyntheticRun("mnist_pipeline", 0, 40, state="running").write(tmp_path)
    page = tmp_path / "compare.html"

    def end_run() -> None:
        wait_until(lambda: page.exists() and '"reload":0.05' in page.read_text(), "the page of the active run")
        write_json(folder.path / "result.json", SyntheticRun("mnist_pipeline").make_result(40, 64))

    thread = threading.Thread(target=end_run)
    thread.start()
    completed = in_process_calls.call_verb("compare", f"--runs-folder={tmp_path}", "--follow=1", COLUMNS="300")
    thread.join()
    assert re.findall(r"-0000 +([a-z]+)", completed.stdout) == ["running", "finished"]
    assert read_page_data(tmp_path)["reload"] == 0
    assert read_page_data(tmp_path)["runs"][0]["state"] == "finished"


def test_after_ctrl_c_the_page_no_longer_reloads_itself(tmp_path: Path) -> None:
    SyntheticRun("mnist_pipeline", 0, 40, state="running").write(tmp_path)
    page = tmp_path / "compare.html"
    command = [sys.executable, "-m", "slurm", "compare", f"--runs-folder={tmp_path}", "--follow=1"]
    process = subprocess.Popen(command, cwd=ROOT, env=make_environment(), stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: page.exists() and RELOADS.search(page.read_text()) is not None, "the page of the active run")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=WAIT_TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert output.endswith("no longer updating the page; the runs continue\n")
    assert read_page_data(tmp_path)["reload"] == 0
