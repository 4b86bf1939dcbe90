"""`make status`: steps, time left and loss in the table, names and notes, and FOLLOW=1."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.runs import description
from common.runs.folder import RunFolder, write_json
from slurm.reports import status_table
from slurm.reports.status import Status, read_status
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import make_environment
from tests.harness.repository import ROOT
from tests.harness.runs.synthetic_runs import SyntheticRun, write_rows

FINISHED = {"format": 2, "state": "finished", "exit_status": 0}


def show(folder: Path, *arguments: str, status: int = 0) -> str:
    return in_process_calls.call_verb("status", f"--runs-folder={folder}", *arguments, status=status).stdout


def write_running_run(folder: Path, **options: str) -> RunFolder:
    """Write a run of 1000 steps that has trained 200 steps in 40 s, with an evaluation of 20 s after step 100."""
    run = SyntheticRun(state="running", steps=1000, settings=options).write(folder)
    rows = []
    for step in range(1, 201):
        seconds = 0.1 * step + 20 * (step > 100)
        rows.append({"global_step": step, "samples": 64 * step, "time": seconds, "loss": 2 / step})
    write_rows(run.list_attempts()[-1], rows)
    return run


def test_an_active_run_has_a_step_a_loss_and_a_time_left(tmp_path: Path) -> None:
    write_running_run(tmp_path)
    (_, line) = show(tmp_path).splitlines()
    columns = re.split(r"  +", line)[1:]
    assert columns[:5] == ["RUNNING", "200/1000", "3 min", "0.01", "640"], "an evaluation takes time, but is no step"
    (row,) = json.loads(show(tmp_path, "--json=1"))
    assert row["total_steps"] == 1000
    assert row["seconds_left"] == pytest.approx(800 * (40 - 0.1) / 199)
    assert row["loss"] == 0.01


def test_an_old_run_has_no_total_and_an_ended_run_no_time_left(tmp_path: Path) -> None:
    old = write_running_run(tmp_path)
    write_json(old.path / "result.json", FINISHED)
    assert re.search(r"FINISHED +200/1000 +- +0.01 ", show(tmp_path))
    (old.path / "result.json").unlink()
    record = old.list_attempts()[-1].attempt_folder / "attempt.json"
    write_json(record, {"parent": None, "step": 0, "rows": 0})
    assert re.search(r"RUNNING +200 +- +0.01 ", show(tmp_path))
    write_json(old.path / "result.json", FINISHED)
    assert re.search(r"FINISHED +200 +- +0.01 ", show(tmp_path))
    write_json(record, {"parent": None, "step": 0, "total_steps": "x"})
    assert re.search(r"FINISHED +200 +- +0.01 ", show(tmp_path))


def test_the_list_has_names_and_a_single_run_has_notes(tmp_path: Path) -> None:
    run = write_running_run(tmp_path, **{"run.name": "wide net", "run.notes": "first try"})
    assert "  [wide net]" in show(tmp_path)
    assert "first try" not in show(tmp_path)
    assert show(tmp_path, "--", str(run.path)).endswith("\nnotes: first try\n")
    description.write_notes(run, "second try")
    (row,) = json.loads(show(tmp_path, "--json=1"))
    assert (row["name"], row["notes"], row["archived"]) == ("wide net", "second try", False)


def test_text_from_files_cannot_control_the_terminal(tmp_path: Path) -> None:
    run = write_running_run(tmp_path)
    (run.path / description.NOTES_FILE).write_text("two\nlines \x1b[31mred")
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("  name: ''\n  notes", '  name: "bell \\a"\n  notes'))
    output = show(tmp_path, "--", str(run.path))
    assert "[bell]" in output
    assert output.endswith("notes: two lines  [31mred\n")


CONFLICTS = {
    "--json=1": "FOLLOW cannot be combined with JSON; omit one of them",
    "--wait=5": "FOLLOW cannot be combined with WAIT; omit one of them",
}


@pytest.mark.parametrize("option, message", CONFLICTS.items())
def test_contradicting_settings_are_refused(tmp_path: Path, option: str, message: str) -> None:
    run = SyntheticRun(steps=10).write(tmp_path)
    completed = in_process_calls.call_verb("status", "--follow=1", option, "--", str(run.path), status=2)
    assert completed.stderr == f"error: {message}\n"
    completed = in_process_calls.call_verb("status", "--follow=yes", status=2)
    assert completed.stderr == "error: FOLLOW must be 0 or 1 (got 'yes')\n"


def test_lines_follow_the_runs_until_all_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_table, "FOLLOW_SECONDS", 0.0)
    monkeypatch.setattr(status_table, "LINE_SECONDS", 0.0)
    SyntheticRun(number=1, steps=10).write(tmp_path)
    running = write_running_run(tmp_path)
    reads = []

    def read_and_continue(folder: RunFolder) -> Status:
        """Let the run train one step before its second read, and end before its fourth read."""
        if folder.path != running.path:
            return read_status(folder)
        reads.append(folder)
        attempt = running.list_attempts()[-1]
        if len(reads) == 2:
            rows = attempt.metrics_file.read_text()
            attempt.metrics_file.write_text(rows + '{"global_step": 201, "samples": 1, "time": 40.1, "loss": 1}\n')
        if len(reads) == 4:
            write_json(running.path / "result.json", FINISHED)
        return read_status(folder)

    monkeypatch.setattr(status_table, "read_status", read_and_continue)
    lines = [re.split(r"  +", line)[1:3] for line in show(tmp_path, "--follow=1").splitlines()[1:]]
    assert lines[0] == ["FINISHED", "10/10"]
    assert lines[1:] == [["RUNNING", "200/1000"], ["RUNNING", "201/1000"], ["FINISHED", "201/1000"]]


def read_terminal(controller: int, expected: str) -> str:
    """Read the output of a terminal until it contains a text."""
    output = ""
    while expected not in output:
        ready, _, _ = select.select([controller], [], [], 60)
        assert ready, output
        output += os.read(controller, 1 << 16).decode()
    return output


def test_a_terminal_shows_a_refreshed_table_until_ctrl_c(tmp_path: Path) -> None:
    """The command does not import torch."""
    run = write_running_run(tmp_path)
    controller, terminal = pty.openpty()
    # A process that a shell has started in the background ignores Ctrl-C, and its children inherit this.
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from slurm.__main__ import run_verb; status = run_verb(sys.argv[1:]); "
    program += "print('torch' in sys.modules); sys.exit(status)"
    command = [sys.executable, "-c", program, "status", "--follow=1", f"--runs-folder={tmp_path}"]
    env = make_environment(TERM="xterm", COLUMNS="140", LINES="20")
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=env, cwd=ROOT) as process:
        first = read_terminal(controller, "200/1000")
        rows = run.list_attempts()[-1].metrics_file
        rows.write_text(rows.read_text() + '{"global_step": 250, "samples": 1, "time": 50, "loss": 1}\n')
        second = read_terminal(controller, "250/1000")
        process.send_signal(signal.SIGINT)
        end = read_terminal(controller, "False")
        assert process.wait(60) == 128 + signal.SIGINT
    assert first.count("heartbeat") == 1
    assert "\x1b[1A" in second, "the cursor moves up to the table"
    assert "Traceback" not in end
