"""gpt_parallel refuses a number of ranks that differs from the product of its degrees."""

from __future__ import annotations

from pathlib import Path

from tests.harness.commands.processes import WAIT_TIMEOUT, run_experiment
from tests.harness.runs.long_runs import find_free_port


def test_a_wrong_number_of_ranks_is_refused(tmp_path: Path) -> None:
    layout = ("replicas=1", "tensor=2", "fsdp=2")
    text = (f"data.root={__file__}", f"data.cache={tmp_path / 'cache'}", "data.context=16")
    completed = run_experiment(
        "gpt_parallel",
        *layout,
        *text,
        runs=tmp_path / "runs",
        timeout=WAIT_TIMEOUT,
        status=2,
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(find_free_port()),
    )
    remedy = "change replicas, stages, fsdp, context or tensor, whose product is the number of ranks"
    assert completed.stderr == (
        f"error: torchrun started 1 rank, but the settings require 4; use --nproc-per-node=4, or {remedy}\n"
    )
    assert not (tmp_path / "runs").exists()
