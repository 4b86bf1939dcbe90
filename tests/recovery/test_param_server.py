"""A killed server ends its run; the run resumed from a checkpoint is bitwise equal to an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.storage import list_resumable_checkpoints
from tests.harness.commands.processes import Settings, run, wait_until
from tests.harness.experiments.registry import BY_NAME
from tests.harness.runs.long_runs import ENDLESS, check_killed_rank, only_folder, train_long
from tests.harness.runs.resuming import ALONE, differences, resume, trained_steps

SERVED = BY_NAME["param_server"]


def test_a_dead_server_is_named_and_its_run_resumes_from_a_checkpoint(tmp_path: Path, quick: Settings) -> None:
    """The second of two servers has a shard of the parameters and of the optimizer's state."""
    settings = (*quick, *SERVED.spread(2), ALONE, *ENDLESS, "checkpoint.every_steps=3", "optim.decay=constant")
    with train_long(SERVED.name, *settings, "launch.step_timeout=600", runs=tmp_path / "killed") as process:
        wait_until(lambda: list_resumable_checkpoints(only_folder(tmp_path / "killed")), "a checkpoint is saved")
        check_killed_rank(process, tmp_path)
    folder = only_folder(tmp_path / "killed")
    steps = max(trained_steps(folder)) + 5
    resumed = resume(SERVED, folder, f"steps={steps}")
    assert "resumed from step" in resumed.stdout, resumed.stderr
    uninterrupted = run(SERVED.name, *settings, f"steps={steps}", runs=tmp_path / "uninterrupted")
    assert trained_steps(folder) == list(range(1, steps + 1))
    assert differences(folder, uninterrupted.folder) == []
