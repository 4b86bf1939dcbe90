"""A sweep in one process: stop requests that come while a run is at its end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from common.runs.folder import Folder, write_json
from common.training import sweep
from configs.sparse_prune import Config


def test_a_stop_request_at_the_end_of_a_run_ends_the_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before, started = signal.getsignal(signal.SIGINT), list[Config]()

    def start(cfg: Config) -> tuple[Folder, int]:
        signal.signal(signal.SIGINT, lambda number, frame: None)  # as the launcher does, whose ranks have all ended
        os.kill(os.getpid(), signal.SIGINT)
        started.append(cfg)
        folder = Folder.create(tmp_path, "sparse_prune", "")
        write_json(folder.path / "result.json", {"format": 2, "state": "finished", "exit_status": 0})
        return folder, 0

    words = [f"runs={tmp_path}", "sweep=true"]
    cfg = Config(repeats=1, levels=["0.5"], criteria=["magnitude"])
    cfg.runs = str(tmp_path)
    assert sweep.run_sweep(cfg, words, start) == 130
    assert len(started) == 1 and signal.getsignal(signal.SIGINT) is before
    assert "finished" in capfd.readouterr().out
