"""The parameter server refuses GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.system.exit_status import EXIT_REFUSED
from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.gpu.gpu_runs import DEVICE
from tests.harness.gpu.visible_gpus import make_gpu_variables


@pytest.mark.skipif(DEVICE == "cpu", reason="the experiment runs on CPUs")
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_gpus_are_refused(device: str, small: Settings, tmp_path: Path) -> None:
    run = run_experiment(
        "param_server", *small, f"launch.device={device}", runs=tmp_path, status=EXIT_REFUSED, **make_gpu_variables()
    )
    assert "use launch.device=cpu" in run.stderr
