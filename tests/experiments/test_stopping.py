"""A stop request and a hanging rank, once each; all signals and experiments: tests/recovery/test_notices.py."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import Settings, get_only_run
from tests.harness.experiments.registry import REPLICATED_ENTRY, STAGED_ENTRY
from tests.harness.runs.long_runs import check_hanging_rank, check_stop_request
from tests.harness.runs.resuming import check_stop_request_in_evaluation


def test_replicas_save_and_exit_on_a_stop_request(tmp_path: Path, quick: Settings) -> None:
    check_stop_request(REPLICATED_ENTRY, signal.SIGUSR2, quick, tmp_path)


@pytest.mark.slow
def test_a_hanging_stage_is_named(tmp_path: Path, quick: Settings) -> None:
    check_hanging_rank(STAGED_ENTRY, quick, tmp_path)
    completed = in_process_calls.call_verb("doctor", f"--run={get_only_run(tmp_path).path}")
    assert re.search("likely cause  .*rank 1 on .* did not answer within 5 s", completed.stdout), completed.stdout
    assert "stuck at " in completed.stdout


def test_a_stop_request_in_an_evaluation_saves_the_state_before_it(tmp_path: Path, digits: Settings) -> None:
    check_stop_request_in_evaluation(STAGED_ENTRY, digits, tmp_path)
