"""`make logs`: following the log of a run to its last line, and the exit status."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from pathlib import Path

import pytest

from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.errors import UserError
from common.system.processes import Process
from slurm.reports import logs
from slurm.scheduling import scheduler
from tests.harness.runs.synthetic_runs import SyntheticRun
from tests.harness.slurm.fake_slurm import FakeSlurm
from tests.unit.slurm.submitted_runs import write_submitted_run

LAST_LINE = "W&B: offline"


def test_the_log_of_a_process_is_followed_until_the_process_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run already has its result."""
    folder = SyntheticRun(steps=10).write(tmp_path)
    log = folder.list_attempts()[-1].log_file(0)
    script = f"sleep 0.7; echo '{LAST_LINE}' >> {shlex.quote(str(log))}"
    with subprocess.Popen(["sh", "-c", script]) as process:
        identity = Process.identify(process.pid)
        start = {"attempt": 1, "host": os.uname().nodename, "pid": identity.pid, "pid_started": identity.start}
        provenance.update_metadata(folder, history=[start])
        threading.Thread(target=process.wait).start()  # as the shell that has started the process
        assert logs.follow_log(folder, log) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["training started", LAST_LINE]


def test_the_log_of_a_job_is_followed_until_the_job_ends(
    tmp_path: Path, fake_here: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run already has its result. SLURM lists the job once, and no longer when it is queried again."""
    folder = SyntheticRun(steps=10).write(tmp_path)
    log = folder.list_attempts()[-1].log_file(0)
    provenance.update_metadata(folder, job={"id": "4711", "scheduler": "SLURM"})
    was_queried = tmp_path / "was_queried"
    end_job = f"test -e {was_queried} && echo '{LAST_LINE}' >> {shlex.quote(str(log))}"
    fake_here.define_command("squeue", f"{end_job} || {{ touch {was_queried}; echo '4711|RUNNING|None'; }}")
    fake_here.define_command("scontrol", "echo JobState=COMPLETED")
    monkeypatch.setattr(scheduler, "QUEUE_CACHE_SECONDS", 0)
    assert logs.follow_log(folder, log) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["training started", LAST_LINE]


def test_the_log_of_a_finished_run_is_followed_no_longer_than_wandb_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SyntheticRun(steps=10, settings={"wandb.finish_timeout": "4"}).write(tmp_path)
    monkeypatch.setattr(logs, "MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(logs, "is_still_writing", lambda folder: True)
    start = time.time()
    os.utime(folder.path / "result.json", (start - 3, start - 3))
    assert logs.follow_log(folder, folder.list_attempts()[-1].log_file(0)) == 0
    assert time.time() - start > 0.9


def test_a_run_without_a_log_or_without_output_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "mnist_pipeline", "")
    with pytest.raises(UserError, match=rf"^{folder.path.name} has no log yet$"):
        logs.read_rank_0_log(folder)
    folder.claim_attempt().log_file(0).touch()
    with pytest.raises(UserError, match=rf"^{folder.path.name} has no output yet; .* FOLLOW=1$"):
        logs.read_rank_0_log(folder)


@pytest.mark.parametrize(
    "exit_code, exit_status", [("0:9", 128 + 9), ("0:1", 128 + 1), ("3:0", 3), ("0:0", 1), ("1:15", 1), ("0:53", 1)]
)
def test_slurm_knows_the_exit_status_of_a_job_without_a_result(
    fake_here: FakeSlurm, runs: Path, exit_code: str, exit_status: int
) -> None:
    folder = write_submitted_run(runs, "17")
    fake_here.define_command("scontrol", f'echo "JobId=17 JobState=FAILED ExitCode={exit_code} DerivedExitCode=0:0"')
    assert logs.find_exit_status(folder) == exit_status
    fake_here.define_command("scontrol", "exit 1")
    fake_here.define_command("sacct", f"echo {exit_code}")
    assert logs.find_exit_status(folder) == exit_status
