"""A killed server ends its run; the run resumed from a checkpoint is bitwise equal to an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.storage import list_resumable_checkpoints
from tests.harness.commands.processes import Settings, get_only_run, run_experiment, wait_until
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.runs.long_runs import ENDLESS_SETTINGS, check_killed_rank, start_long_run
from tests.harness.runs.resuming import ONE_THREAD, find_differences, list_trained_steps, resume_run

SERVED = ENTRY_BY_NAME["param_server"]


def test_a_dead_server_is_named_and_its_run_resumes_from_a_checkpoint(tmp_path: Path, quick: Settings) -> None:
    """The second of two servers has a shard of the parameters and of the optimizer's state."""
    settings = (
        *quick,
        *SERVED.make_rank_settings(2),
        ONE_THREAD,
        *ENDLESS_SETTINGS,
        "checkpoint.every_steps=3",
        "optim.decay=constant",
    )
    with start_long_run(SERVED.name, *settings, "launch.step_timeout=600", runs=tmp_path / "killed") as process:
        wait_until(lambda: list_resumable_checkpoints(get_only_run(tmp_path / "killed")), "a checkpoint is saved")
        check_killed_rank(process, tmp_path)
    folder = get_only_run(tmp_path / "killed")
    steps = max(list_trained_steps(folder)) + 5
    resumed = resume_run(SERVED, folder, f"steps={steps}")
    assert "resumed from step" in resumed.stdout, resumed.stderr
    uninterrupted = run_experiment(SERVED.name, *settings, f"steps={steps}", runs=tmp_path / "uninterrupted")
    assert list_trained_steps(folder) == list(range(1, steps + 1))
    assert find_differences(folder, uninterrupted.folder) == []
