"""Only the recorded process is signalled, even if another process has its pid today."""

from __future__ import annotations

from pathlib import Path
from subprocess import Popen

from common.system.processes import Process
from tests.harness.commands.processes import WAIT_TIMEOUT


def test_only_the_recorded_process_is_killed(waiting_process: Popen[bytes], tmp_path: Path) -> None:
    process = Process.identify(waiting_process.pid)
    process.save(tmp_path / "holder")
    assert Process.load(tmp_path / "holder") == process
    with_reused_pid = process._replace(start=process.start - 1)
    assert not with_reused_pid.is_alive()
    with_reused_pid.kill()
    assert waiting_process.poll() is None
    process.kill()
    assert waiting_process.wait(timeout=WAIT_TIMEOUT) == -9
    assert Process.load(tmp_path / "holder") is None
    process.kill()  # the process has ended, and nothing happens
