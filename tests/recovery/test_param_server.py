"""A killed server ends its run; the run resumed from a checkpoint is bitwise equal to an uninterrupted one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from common.checkpoint.storage import list_resumable_checkpoints
from tests.harness.commands.processes import WAIT_TIMEOUT, find_processes, run_experiment, wait_until
from tests.harness.experiments.registry import BY_NAME
from tests.harness.runs.long_runs import ENDLESS, only_folder, ranks_of, train_long
from tests.harness.runs.resuming import ALONE, differences, resume, trained_steps

SERVED = BY_NAME["param_server"]


def test_a_dead_server_is_named_and_its_run_resumes_from_a_checkpoint(tmp_path: Path, quick: tuple[str, ...]) -> None:
    """The second of two servers has a shard of the parameters and of the optimizer's state."""
    settings = (*quick, *SERVED.spread(2), ALONE, *ENDLESS, "checkpoint.every_steps=3", "optim.decay=constant")
    with train_long(SERVED.name, *settings, "launch.step_timeout=600", runs=tmp_path / "killed") as process:
        wait_until(lambda: list_resumable_checkpoints(only_folder(tmp_path / "killed")), "a checkpoint is saved")
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        _, err = process.communicate(WAIT_TIMEOUT)
        assert process.returncode == 128 + signal.SIGKILL
        assert "error: rank 1 (pid" in err, err
        assert "killed by SIGKILL" in err, err
        assert "Traceback" not in err, err
    assert not find_processes(str(tmp_path))
    folder = only_folder(tmp_path / "killed")
    steps = max(trained_steps(folder)) + 5
    resumed = resume(SERVED, folder, f"steps={steps}")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from step" in resumed.stdout, resumed.stderr
    uninterrupted = run_experiment(SERVED.name, *settings, f"steps={steps}", runs=tmp_path / "uninterrupted")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    assert trained_steps(folder) == list(range(1, steps + 1))
    assert differences(folder, uninterrupted.folder) == []
