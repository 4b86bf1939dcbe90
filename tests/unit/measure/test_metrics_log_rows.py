"""Rows of metrics.jsonl: values of single steps, of single ranks, and of evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.measure.metrics_log import MetricsLog
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.runs.metrics_writer import MetricsWriter
from tests.harness.ranks.logging_ranks import STEPS, OneSamplePerStep
from tests.harness.ranks.programs import check_program


def select_values(rows: list[dict[str, Any]], name: str) -> dict[int, Any]:
    """Return the values of one name by step."""
    return {row["global_step"]: row[name] for row in rows if name in row}


@pytest.mark.parametrize("mode, mean_rank", [("averaged", 0.5), ("0", 0.0), ("1", 1.0)])
def test_values_of_single_steps_and_ranks_are_written(mode: str, mean_rank: float, tmp_path: Path) -> None:
    check_program("logging_ranks", tmp_path, mode)
    (path,) = tmp_path.iterdir()
    rows = list(RunFolder(path).list_attempts()[0].read_attempt_rows())
    steps = list(range(1, STEPS + 1))
    assert [row["global_step"] for row in rows] == steps
    assert [row["loss"] for row in rows] == [step + mean_rank for step in steps]
    assert select_values(rows, "every_10_steps") == {1: 2.0, 11: 22.0, 21: 42.0}
    assert select_values(rows, "infinite") == {7: None, 14: None, 21: None}, "JSON has no infinity"
    assert select_values(rows, "on_rank_1") == ({5: 7.0} if mode == "averaged" else {})


def test_an_evaluation_is_written_after_the_steps_before_it(tmp_path: Path, world: World) -> None:
    folder = RunFolder.create(tmp_path, "mnist_pipeline", "").claim_attempt()
    ranks = Ranks(World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1))
    log = MetricsLog(ranks, MetricsWriter(folder.metrics_file, print), OneSamplePerStep(), source=0)
    for step in (1, 2, 3):
        log.add_step(step, 0.0, {"loss": torch.tensor(float(step))})
    log.write_values(3, {"test_loss": 0.5})
    rows = list(folder.list_attempts()[0].read_attempt_rows())
    assert [row["global_step"] for row in rows] == [1, 2, 3, 3]
    assert ["test_loss" in row for row in rows] == [False, False, False, True]


@pytest.mark.parametrize("custom_loss", ["", "focal_loss"])
def test_a_loss_of_nan_names_a_custom_loss_as_a_possible_cause(tmp_path: Path, world: World, custom_loss: str) -> None:
    folder = RunFolder.create(tmp_path, "mnist_pipeline", "").claim_attempt()
    writer = MetricsWriter(folder.metrics_file, print)
    log = MetricsLog(Ranks(world), writer, OneSamplePerStep(), source=0, custom_loss=custom_loss)
    log.add_step(1, 0.0, {"loss": torch.tensor(float("nan"))})
    log.flush()
    assert "the loss of step 1 is nan" in log.divergence
    assert ("; if the custom loss focal_loss can return NaN" in log.divergence) is bool(custom_loss)


def test_rows_of_fast_steps_are_written_together(tmp_path: Path, world: World) -> None:
    folder = RunFolder(tmp_path).claim_attempt()
    log = MetricsLog(Ranks(world), MetricsWriter(folder.metrics_file, print), OneSamplePerStep(), source=0)
    for step in range(1, 11):
        log.add_step(step, step / 1000, {"loss": 0.5})
    assert log.is_flush_due
    log.flush()
    assert not log.is_flush_due, "there is no new row"
    log.add_step(11, 0.011, {"loss": 0.5})
    assert not log.is_flush_due
