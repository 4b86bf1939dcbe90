"""Heartbeats of ranks, as reports read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from slurm.reports import heartbeats


@pytest.mark.parametrize("damaged_value", [None, "x", [], {}])
def test_a_damaged_heartbeat_counts_as_one_before_the_first_step(tmp_path: Path, damaged_value: object) -> None:
    attempt = RunFolder.create(tmp_path, "mnist_pipeline", "").claim_attempt()
    content = {"step": damaged_value, "time": damaged_value, "before_backward": damaged_value}
    (attempt.attempt_folder / "heartbeat-0.json").write_text(json.dumps(content))
    (heartbeat,) = heartbeats.read_heartbeats(attempt)
    assert heartbeat.step == 0
    assert heartbeat.time == 0
    assert heartbeat.before_backward is None
