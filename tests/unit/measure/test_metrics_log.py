"""The metrics log of an elastic run: if rank 0 is lost, another rank continues it and writes each row once."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from common.measure.metrics_log import SharedMetricsLog
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.metrics_writer import MetricsWriter
from tests.harness.ranks.logging_ranks import OneSamplePerStep


def open_log(file: Path, *, is_main: bool) -> SharedMetricsLog:
    world = World(hosts=("here", "here"), device=torch.device("cpu"), backend="gloo", threads=1)
    ranks = Ranks(dataclasses.replace(world, rank=0 if is_main else 1, size=2))
    return SharedMetricsLog(ranks, MetricsWriter(file, print), OneSamplePerStep())


def add_steps(log: SharedMetricsLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.add_step(step, time.perf_counter(), {"loss": 1.0 / step})
    log.flush()


def become_main(log: SharedMetricsLog) -> None:
    """Continue after the loss of rank 0, as the members of a new generation do."""
    log.ranks.renumber(0, ["here"])
    log.take_over_metrics_file()
    log.write_rows(log.collect_unwritten_rows())


def read_positions(file: Path) -> list[tuple[int, bool]]:
    """Return the step of each row, and whether the row is an evaluation."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["global_step"], "test_loss" in row) for row in rows]


@pytest.mark.parametrize("steps_written, evaluation_written", [(3, False), (5, False), (5, True)])
def test_rows_that_a_lost_rank_0_has_not_written_are_written_once(
    steps_written: int, evaluation_written: bool, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    lost = open_log(file, is_main=True)
    survivor = open_log(file, is_main=False)
    add_steps(lost, 1, steps_written)
    add_steps(survivor, 1, 5)
    survivor.write_values(5, {"test_loss": 0.5})
    if evaluation_written:
        lost.write_values(5, {"test_loss": 0.5})

    become_main(survivor)
    training_rows = [(step, False) for step in range(1, 6)]
    assert read_positions(file) == [*training_rows, (5, True)]

    survivor.write_values(5, {"test_loss": 0.5})  # all ranks repeat an evaluation that one of them had not finished
    add_steps(survivor, 6, 7)
    assert read_positions(file)[6:] == [(6, False), (7, False)]


def test_rows_are_dropped_after_rank_0_has_written_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rank 0 is lost before, another rank writes the rows. A rank that was rank 0 does not write them again."""
    file = tmp_path / "folder that does not exist yet" / "metrics.jsonl"
    first_main = open_log(file, is_main=True)
    second_main = open_log(file, is_main=False)
    for log in (first_main, second_main):
        add_steps(log, 1, 5)
        log.write_values(5, {"test_loss": 0.5})

    def drop_unwritten_rows() -> None:
        is_buffered = bool(first_main.writer.buffered_lines)
        monkeypatch.setattr(World, "broadcast", lambda *_: is_buffered)
        second_main.drop_unwritten_rows()

    drop_unwritten_rows()
    file.parent.mkdir()
    become_main(second_main)
    rows = [*[(step, False) for step in range(1, 6)], (5, True)]
    assert read_positions(file) == rows

    become_main(first_main)
    add_steps(first_main, 6, 7)
    assert read_positions(file) == [*rows, (6, False), (7, False)]
    drop_unwritten_rows()
    assert second_main.collect_unwritten_rows() == []
