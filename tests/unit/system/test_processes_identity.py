"""Only the recorded process is signalled, even if another process has its pid today."""

from __future__ import annotations

import subprocess
from pathlib import Path

from common.system.processes import Process
from tests.harness.commands.processes import WAIT_TIMEOUT


def test_only_the_recorded_process_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as sleep:
        process = Process.identify(sleep.pid)
        process.save(tmp_path / "holder")
        assert Process.load(tmp_path / "holder") == process
        with_reused_pid = process._replace(start=process.start - 1)
        assert not with_reused_pid.is_alive()
        with_reused_pid.kill()
        assert sleep.poll() is None
        process.kill()
        assert sleep.wait(timeout=WAIT_TIMEOUT) == -9
    assert Process.load(tmp_path / "holder") is None
    process.kill()  # the process has ended, and nothing happens
