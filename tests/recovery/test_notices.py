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
from tests.harness.commands.execution import Command
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    find_processes,
    make_environment,
    make_run_command,
    run_experiment,
    wait_until,
)
from tests.harness.experiments.registry import BY_NAME, EXPERIMENTS, REPLICATED, STAGED, TRAINING, Entry
from tests.harness.runs.long_runs import ENDLESS, check_hanging_rank, check_notice, only_folder, ranks_of, train_long
from tests.harness.runs.resuming import check_notice_in_evaluation

NOTICES = [(STAGED, number) for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)]
NOTICES += [(entry, signal.SIGUSR2) for entry in EXPERIMENTS if entry not in (STAGED, REPLICATED)]


@pytest.mark.parametrize(("entry", "number"), NOTICES, ids=lambda value: value.name)
def test_a_run_that_gets_a_stop_request_saves_and_exits(
    entry: Entry, number: signal.Signals, tmp_path: Path, quick: tuple[str, ...]
) -> None:
    check_notice(entry, number, quick, tmp_path)


@pytest.mark.parametrize("entry", [REPLICATED, BY_NAME["resnet_modelparallel"]], ids=lambda entry: entry.name)
def test_a_hanging_rank_is_named(entry: Entry, tmp_path: Path, quick: tuple[str, ...]) -> None:
    check_hanging_rank(entry, quick, tmp_path)


@pytest.mark.parametrize("entry", [entry for entry in TRAINING if entry != STAGED], ids=lambda entry: entry.name)
def test_a_stop_request_in_an_evaluation_saves_the_state_before_it(
    entry: Entry, tmp_path: Path, digits: tuple[str, ...]
) -> None:
    check_notice_in_evaluation(entry, digits, tmp_path)


def test_a_cancelled_run_saves_and_reports_it(tmp_path: Path, quick: tuple[str, ...]) -> None:
    with train_long(STAGED.name, *quick, *ENDLESS, runs=tmp_path) as process:
        folder = only_folder(tmp_path)
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


def test_a_run_that_is_interrupted_twice_ends_at_once(tmp_path: Path, quick: tuple[str, ...]) -> None:
    limits = ("checkpoint.grace=600", "launch.step_timeout=600")
    with train_long(STAGED.name, *quick, *ENDLESS, *limits, runs=tmp_path) as process:
        os.kill(ranks_of(process)[1], signal.SIGSTOP)  # prevents that a checkpoint is saved
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(WAIT_TIMEOUT)  # less than the grace time and the step timeout
        assert process.returncode == 128 + signal.SIGINT
        assert "stopped by Ctrl-C" in err
        assert "Traceback" not in err
        assert not find_processes(str(tmp_path))


def test_a_run_with_a_hanging_rank_ends_after_the_grace_time_of_a_stop_request(
    tmp_path: Path, quick: tuple[str, ...]
) -> None:
    settings = (*quick, *ENDLESS, "checkpoint.grace=2", "launch.step_timeout=600")
    with train_long(REPLICATED.name, *settings, runs=tmp_path) as process:
        os.kill(ranks_of(process)[1], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        process.communicate(WAIT_TIMEOUT)
        assert process.returncode not in (0, EXIT_RESUMABLE)
        log = only_folder(tmp_path).list_attempts()[0].log_file(0).read_text()
        assert "Timeout (0:00:02)" in log, "the stacks of all threads"
        assert not find_processes(str(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2])
def test_a_stop_request_while_data_are_prepared_leaves_no_partial_files(number: signal.Signals, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    runs = tmp_path / "runs"
    settings = ("data.name=digits", f"data.cache={cache}", "data.test_limit=100", "steps=3")
    process = Command(make_run_command(STAGED.name, *settings, runs=runs), env=make_environment(), new_session=True)
    wait_until(lambda: list(cache.glob(".digits-*")), "the run prepares its data", pause=0.002)
    process.send_signal(number)
    out, err = process.communicate(WAIT_TIMEOUT)
    expected_status = 128 + number if number == signal.SIGINT else -number
    assert process.returncode == expected_status
    assert "Traceback" not in err
    assert not runs.exists(), out + err
    assert not list(cache.glob("digits-*")), out + err
    assert not find_processes(str(tmp_path)), out + err
    completed = run_experiment(STAGED.name, *settings, runs=runs)
    assert completed.returncode == 0, completed.stderr
    assert len(completed.losses) == 3, completed.stderr
    assert not list(cache.glob(".digits-*")), "the next preparation deletes partial files"
