"""torchrun starts the same script, and starts its processes again after one of them has failed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.harness import warm
from tests.harness.long_runs import free_port, only_folder, ranks_of
from tests.harness.processes import PATIENCE, command, environment, run, wait_until
from tests.harness.resuming import trained_steps
from tests.harness.warm import Command, end_session


def test_torchrun_that_starts_again_goes_on_in_the_same_folder(tmp_path: Path, digits: tuple[str, ...]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    places = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    settings = ("steps=100", "batch=16", "checkpoint.every_steps=5", "data.test_limit=100", "launch.threads=1")
    script = command("ddp_multinode", *digits, *settings, runs=tmp_path / "runs")[1:]
    launched = Command([*launcher, *places, *script], env=environment(), session=True)
    try:
        wait_until(
            lambda: any(tmp_path.glob("runs/*/attempts/0001/checkpoints/step-*")) or launched.poll() is not None,
            "a checkpoint is saved",
        )
        assert launched.poll() is None, launched.err
        os.kill(ranks_of(launched)[1], signal.SIGKILL)
        launched.wait(PATIENCE)
    finally:
        end_session(launched.pid)
        launched.wait(PATIENCE)
    assert launched.returncode == 0, launched.err[-3000:]
    folder = only_folder(tmp_path / "runs")
    assert folder.result["state"] == "finished"
    assert len(folder.list_attempts()) == 2
    assert folder.list_attempts()[1].parent_record[1] >= 5  # type: ignore[index]
    assert trained_steps(folder) == list(range(1, 101))


def test_torchrun_starts_the_same_script(tmp_path: Path, digits: tuple[str, ...]) -> None:
    with_launcher = run("mnist_pipeline", *digits, runs=tmp_path / "with_launcher")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    script = command("mnist_pipeline", *digits, runs=tmp_path / "torchrun")[1:]
    argv = [*launcher, f"--master-port={free_port()}", *script]
    completed = warm.execute(argv, env=environment(), timeout=PATIENCE, real=True)
    assert completed.returncode == 0, completed.stderr
    (folder,) = (tmp_path / "torchrun").iterdir()
    rows = [line for line in (folder / "attempts/0001/metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(rows) == 30 == len(with_launcher.losses)
    assert all(f'"loss": {loss!r}' in row for row, loss in zip(rows, with_launcher.losses, strict=True))
    assert '"launched_by": "torchrun"' in (folder / "meta.json").read_text()
