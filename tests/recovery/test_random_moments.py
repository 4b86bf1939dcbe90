"""Notices at random moments, in a small set of images; in one of 60,000: tests/harness/random_moments.py."""

from __future__ import annotations

from pathlib import Path

from tests.harness.chance import open_stream
from tests.harness.random_moments import trials


def test_a_run_that_is_stopped_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    found = trials(images=600, moments=1, draw=open_stream("moments"), scratch=tmp_path)
    assert not [trial.line() for trial in found if trial.differs]
