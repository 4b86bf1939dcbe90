"""The parameter server refuses GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.system.exit_status import EXIT_REFUSED
from tests.harness.commands.processes import Settings
from tests.harness.gpu.gpu_runs import DEVICE, train_without_sharing


@pytest.mark.skipif(DEVICE == "cpu", reason="the experiment runs on CPUs")
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_gpus_are_refused(device: str, small: Settings, tmp_path: Path) -> None:
    settings = (*small, f"launch.device={device}")
    run = train_without_sharing("param_server", *settings, runs=tmp_path, status=EXIT_REFUSED)
    assert "use launch.device=cpu" in run.stderr
