"""Collectives with NCCL return exact results for every operation and data type."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import Settings
from tests.harness.gpu.gpu_runs import DEVICE, train_on_gpu

TYPES = "float32,float64,float16,bfloat16,int32,int64"
OPERATIONS = "sendrecv,broadcast,all_reduce,reduce_scatter,all_gather"


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_are_exact(ranks: int, tmp_path: Path) -> None:
    settings: Settings = ("sizes=[1K]", f"ops=[{OPERATIONS}]", f"dtypes=[{TYPES}]", "rounds=1", "plot=false")
    one_side = ("algorithms=[ring]", "transports=[memory]", "launch.threads=1", "log.progress=none")
    run = train_on_gpu("collectives", *settings, *one_side, f"processes_per_node={ranks}", runs=tmp_path)
    assert run.result["exact_results"] > 0
    assert ("nccl" if DEVICE == "cuda" else "gloo") in run.stdout
