"""Heartbeats of ranks, as reports read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.runs.run_progress import GENERATIONS_FILE
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


def test_a_rank_that_an_elastic_run_has_lost_is_no_straggler_and_has_no_shard(tmp_path: Path) -> None:
    attempt = RunFolder.create(tmp_path, "mnist_pipeline", "").claim_attempt()
    for rank, before_backward in enumerate((0.010, 0.010, 0.500)):
        content = {"step": 4, "time": 1.0, "before_backward": before_backward, "samples": 8 + rank}
        (attempt.attempt_folder / f"heartbeat-{rank}.json").write_text(json.dumps(content))
    slow = heartbeats.find_slow_rank(heartbeats.read_heartbeats(attempt))
    assert slow is not None
    assert slow.rank == 2

    change = {"step": 5, "ranks": [0, 1], "lost": [2], "joined": [], "seconds": 0.1}
    (attempt.attempt_folder / GENERATIONS_FILE).write_text(json.dumps([change]))
    ranks = heartbeats.read_heartbeats(attempt)
    assert [rank.is_lost for rank in ranks] == [False, False, True]
    assert heartbeats.describe_slow_rank(ranks) == ""
    assert heartbeats.describe_shards(ranks) == "shards 8+9"

    joined = {"step": 9, "ranks": [0, 1, 2], "lost": [], "joined": [2], "seconds": 0.1}
    (attempt.attempt_folder / GENERATIONS_FILE).write_text(json.dumps([change, joined]))
    assert "rank 2" in heartbeats.describe_slow_rank(heartbeats.read_heartbeats(attempt))
