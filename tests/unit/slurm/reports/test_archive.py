"""`make note` and `make archive`: notes of a run, and runs that reports leave out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.runs import description
from common.runs.folder import RunFolder
from tests.harness.commands import in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.runs.synthetic_runs import SyntheticRun


def call(verb: str, runs: Path, *arguments: str, status: int = 0) -> Completed:
    return in_process_calls.call_verb(verb, f"--runs-folder={runs}", *arguments, status=status)


def list_ids(verb: str, runs: Path, *arguments: str) -> list[str]:
    """Return the last four characters of the ids of the runs in the JSON output of a report, sorted."""
    answer = json.loads(call(verb, runs, "--json=1", *arguments).stdout)
    rows = answer["runs"] if verb == "compare" else answer
    return sorted(row["run"][-4:] for row in rows)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with two runs of one experiment and a run of another one."""
    for number, name in enumerate(("mnist_pipeline", "mnist_pipeline", "ddp_multinode")):
        SyntheticRun(name, number, 10).write(tmp_path)
    return tmp_path


def test_archived_runs_are_left_out_unless_all_or_named(runs: Path) -> None:
    archived = call("archive", runs, "--runs=0001")
    assert archived.stdout.splitlines()[1].startswith("archived 1 run; to list them: make status ALL=1; ")
    output = call("status", runs).stdout
    assert "-0001" not in output
    assert output.endswith("not listed: 1 archived run; to list all runs: make status ALL=1\n")
    (line,) = [line for line in call("status", runs, "--all=1").stdout.splitlines() if "-0001" in line]
    assert line.endswith("(archived)")
    assert list_ids("compare", runs) == ["0000", "0002"]
    assert list_ids("compare", runs, "--all=1") == ["0000", "0001", "0002"]
    assert list_ids("compare", runs, "--runs=0001 0002") == ["0001", "0002"], "RUNS names archived runs, too"
    assert call("archive", runs, "--runs=0001", "--undo=1").stdout.endswith("restored 1 run\n")
    assert list_ids("compare", runs) == ["0000", "0001", "0002"]


def test_runs_of_an_experiment_are_archived_together(runs: Path) -> None:
    call("archive", runs, "--name=mnist_pipeline")
    assert list_ids("compare", runs) == ["0002"]
    call("archive", runs, "--last=1")
    refused = call("compare", runs, status=2)
    assert refused.stderr == "error: all of these runs are archived; to select archived runs, add ALL=1\n"
    assert call("status", runs).stdout.count("\n") == 2, "the head and the number of archived runs"


def test_notes_replace_those_of_the_start(runs: Path) -> None:
    folder = SyntheticRun(number=3, settings={"run.name": "a", "run.notes": "at the start"}).write(runs)
    text = 'lr $(touch pwned) "x"'
    assert call("note", runs, "--run=0003", f"--text={text}").stdout == f"{folder.path.name}: {text}\n"
    (row,) = json.loads(call("compare", runs, "--json=1", "--runs=0003").stdout)["runs"]
    assert (row["name"], row["notes"]) == ("a", text)
    assert call("note", runs, "--run=0003", "--text=").stdout == f"{folder.path.name}: deleted the notes\n"
    assert description.read_notes(folder, "at the start") == ""


REFUSED_ARGUMENTS = {
    "note --run=0000": 'TEXT is missing; set TEXT="..." to the new notes, or TEXT= to delete the notes',
    "note --text=x": "RUN is missing; set RUN=<id>",
    "note --run=ffff --text=x": "no such run folder",
    "note --run=0000 --text=two\nlines": "TEXT: line breaks and other characters that cannot be printed are not",
    f"note --run=0000 --text={'x' * 1001}": "TEXT: 1001 characters are too many; use at most 1000",
    "archive": "RUNS is missing; select the runs to archive with",
    "archive --runs=ffff": "no such run folder",
    "archive --runs=0000 --undo=yes": "UNDO must be 0 or 1 (got 'yes')",
    "compare --all=2": "ALL must be 0 or 1 (got '2')",
}


@pytest.mark.parametrize("command, message", REFUSED_ARGUMENTS.items())
def test_invalid_arguments_are_refused_and_change_nothing(runs: Path, command: str, message: str) -> None:
    verb, *arguments = command.split(" ")
    completed = call(verb, runs, *arguments, status=2)
    assert message in completed.stderr
    assert completed.stderr.startswith("error: ")
    assert completed.stderr.count("\n") == 1
    for path in runs.iterdir():
        assert not description.is_archived(RunFolder(path))
        assert not (path / description.NOTES_FILE).exists()
