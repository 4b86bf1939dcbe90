"""Stop requests, also repeated ones, and hanging ranks: the run ends as documented and leaves no process.

A stop request to ddp_multinode and a hanging rank of mnist_pipeline: tests/experiments/test_stopping.py.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from common.checkpoint import storage
from common.system.exit_status import EXIT_RESUMABLE
from slurm.reports import cancel, diagnosis, logs, status
from tests.harness.commands.execution import start_command
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    Settings,
    find_processes,
    get_only_run,
    make_environment,
    make_run_command,
    run_experiment,
    wait_until,
)
from tests.harness.environment.randomness import draw_cases
from tests.harness.experiments.registry import (
    ENTRIES,
    ENTRY_BY_NAME,
    REPLICATED_ENTRY,
    STAGED_ENTRY,
    TRAINING_ENTRIES,
    Entry,
)
from tests.harness.runs.long_runs import (
    ENDLESS_SETTINGS,
    check_hanging_rank,
    check_stop_request,
    list_rank_pids,
    start_long_run,
)
from tests.harness.runs.resuming import check_stop_request_in_evaluation

NOTICES_OF_SLURM = [(entry, signal.SIGUSR2) for entry in ENTRIES if entry != REPLICATED_ENTRY]
NOTICES = [(STAGED_ENTRY, signal.SIGTERM), (STAGED_ENTRY, signal.SIGINT)]
NOTICES += draw_cases("stop requests", NOTICES_OF_SLURM, 4)
EVALUATING_ENTRIES = [entry for entry in TRAINING_ENTRIES if entry != STAGED_ENTRY]
HANGING_ENTRIES = [REPLICATED_ENTRY, ENTRY_BY_NAME["resnet_modelparallel"]]


@pytest.mark.parametrize("entry, number", NOTICES, ids=lambda value: value.name)
def test_a_run_that_gets_a_stop_request_saves_and_exits(
    entry: Entry, number: signal.Signals, tmp_path: Path, quick: Settings
) -> None:
    check_stop_request(entry, number, quick, tmp_path)


@pytest.mark.parametrize("entry", draw_cases("hanging ranks", HANGING_ENTRIES, 1), ids=lambda entry: entry.name)
def test_a_hanging_rank_is_named(entry: Entry, tmp_path: Path, quick: Settings) -> None:
    check_hanging_rank(entry, quick, tmp_path)


@pytest.mark.parametrize(
    "entry", draw_cases("stop requests in evaluations", EVALUATING_ENTRIES, 3), ids=lambda entry: entry.name
)
def test_a_stop_request_in_an_evaluation_saves_the_state_before_it(
    entry: Entry, tmp_path: Path, digits: Settings
) -> None:
    check_stop_request_in_evaluation(entry, digits, tmp_path)


def test_a_cancelled_run_saves_and_reports_it(tmp_path: Path, quick: Settings) -> None:
    with start_long_run(STAGED_ENTRY.name, *quick, *ENDLESS_SETTINGS, runs=tmp_path) as process:
        folder = get_only_run(tmp_path)
        assert cancel.cancel_run(folder).startswith("canceled process ")
        process.communicate(WAIT_TIMEOUT)
    assert process.returncode == EXIT_RESUMABLE
    assert storage.list_resumable_checkpoints(folder)
    assert status.read_state(folder)[0] == "CANCELLED"
    assert folder.result["exit_status"] == 130
    assert diagnosis.collect_diagnosis(folder)["cause"] == "", "the state is the cause"
    assert "checkpoint saved at step" in logs.read_rank_0_log(folder)
    # the empty log of a new attempt does not hide the log of the attempt before
    new_attempt = folder.claim_attempt()
    (new_attempt.attempt_folder / "logs").mkdir(exist_ok=True)
    new_attempt.log_file(0).touch()
    assert "checkpoint saved at step" in logs.read_rank_0_log(folder)


def test_a_run_that_is_interrupted_twice_ends_at_once(tmp_path: Path, quick: Settings) -> None:
    limits = ("checkpoint.grace=600", "launch.step_timeout=600")
    with start_long_run(STAGED_ENTRY.name, *quick, *ENDLESS_SETTINGS, *limits, runs=tmp_path) as process:
        os.kill(list_rank_pids(process)[1], signal.SIGSTOP)  # prevents that a checkpoint is saved
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(WAIT_TIMEOUT)  # less than the grace time and the step timeout
        assert process.returncode == 128 + signal.SIGINT
        assert "stopped by Ctrl-C" in err
        assert "Traceback" not in err
        assert not find_processes(str(tmp_path))


def test_a_run_with_a_hanging_rank_ends_after_the_grace_time_of_a_stop_request(tmp_path: Path, quick: Settings) -> None:
    settings = (*quick, *ENDLESS_SETTINGS, "checkpoint.grace=2", "launch.step_timeout=600")
    with start_long_run(REPLICATED_ENTRY.name, *settings, runs=tmp_path) as process:
        os.kill(list_rank_pids(process)[1], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(WAIT_TIMEOUT)
        assert process.returncode not in (0, EXIT_RESUMABLE)
        assert "error: rank 0 did not stop within checkpoint.grace=2 s; see its log, or raise checkpoint.grace" in err
        log = get_only_run(tmp_path).list_attempts()[0].log_file(0).read_text()
        assert "Timeout (0:00:02)" in log, "the stacks of all threads"
        assert not find_processes(str(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2])
def test_a_stop_request_while_data_are_prepared_leaves_no_partial_files(number: signal.Signals, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    runs = tmp_path / "runs"
    settings = ("data.name=digits", f"data.cache={cache}", "data.test_limit=100", "steps=3")
    argv = make_run_command(STAGED_ENTRY.name, *settings, runs=runs)
    with start_command(argv, env=make_environment()) as process:
        wait_until(lambda: list(cache.glob(".digits-*")), "the run prepares its data", pause=0.002)
        process.send_signal(number)
        out, err = process.communicate(WAIT_TIMEOUT)
        expected_status = 128 + number if number == signal.SIGINT else -number
        assert process.returncode == expected_status
        assert "Traceback" not in err
        assert not runs.exists(), out + err
        assert not list(cache.glob("digits-*")), out + err
        # The kernel kills the process that prepares the data when its parent has ended.
        wait_until(lambda: not find_processes(str(tmp_path)), f"all processes of the run have ended: {out + err}")
    completed = run_experiment(STAGED_ENTRY.name, *settings, runs=runs)
    assert len(completed.losses) == 3, completed.stderr
    assert not list(cache.glob(".digits-*")), "the next preparation deletes partial files"
