"""Elastic runs that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.dataparallel import Elastic
from tests.unit.techniques.elastic.elastic_run import ElasticRun, StartRun


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    """Start an elastic run of some ranks; other arguments are its settings."""
    runs = []

    def start(
        ranks: int, *, irreplaceable: int = 0, absent: int = 0, start_timeout: float = 60, **settings: Any
    ) -> ElasticRun:
        run = ElasticRun(
            tmp_path / "coordinator",
            ranks,
            Elastic(on=True, **settings),
            irreplaceable=irreplaceable,
            absent=absent,
            start_timeout=start_timeout,
        )
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.stop()
