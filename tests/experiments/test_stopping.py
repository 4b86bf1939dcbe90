"""A notice to stop and a rank that hangs, once each; all signals and experiments: tests/recovery/test_notices.py."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.harness.long_runs import check_hanging_rank, check_notice
from tests.harness.registry import REPLICATED, STAGED


def test_replicas_that_get_a_notice_save_and_leave(tmp_path: Path, quick: tuple[str, ...]) -> None:
    check_notice(REPLICATED, signal.SIGUSR2, quick, tmp_path)


def test_a_stage_that_hangs_is_named(tmp_path: Path, quick: tuple[str, ...]) -> None:
    check_hanging_rank(STAGED, quick, tmp_path)
