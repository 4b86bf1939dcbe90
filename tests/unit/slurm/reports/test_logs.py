"""Following the log of a run to its last line."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from pathlib import Path

import pytest

from common.runs import provenance
from common.system.processes import Process
from slurm.reports import logs
from slurm.scheduling import scheduler
from tests.harness.fake_slurm import Fake
from tests.harness.made_runs import Made

LAST = "W&B: offline"


def test_a_process_that_has_its_result_is_followed_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Made(steps=10).write(tmp_path)
    log = folder.list_attempts()[-1].log_file(0)
    writes = f"sleep 0.7; echo '{LAST}' >> {shlex.quote(str(log))}"
    with subprocess.Popen(["sh", "-c", writes]) as process:
        found = Process.identify(process.pid)
        history = {"attempt": 1, "host": os.uname().nodename, "pid": found.pid, "pid_started": found.start}
        provenance.update_metadata(folder, history=[history])
        threading.Thread(target=process.wait).start()  # as the shell waits for it that started it
        assert logs.follow_log(folder, log) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["it began", LAST]


def test_a_job_that_has_its_result_is_followed_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Made(steps=10).write(tmp_path)
    log, asked = folder.list_attempts()[-1].log_file(0), tmp_path / "asked"
    provenance.update_metadata(folder, job={"id": "4711", "scheduler": "SLURM"})
    fake = Fake(tmp_path)
    ends = f"test -e {asked} && echo '{LAST}' >> {shlex.quote(str(log))}"
    fake.answer("squeue", f"{ends} || {{ touch {asked}; echo '4711|RUNNING|None'; }}")
    fake.answer("scontrol", "echo JobState=COMPLETED")
    for name, value in (("QUEUE_CACHE", {}), ("FAILURE_CACHE", {}), ("QUEUE_CACHE_SECONDS", 0)):
        monkeypatch.setattr(scheduler, name, value)
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    assert logs.follow_log(folder, log) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["it began", LAST]


def test_a_job_that_does_not_end_is_followed_no_longer_than_wandb_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Made(steps=10, settings={"wandb.finish_timeout": "4"}).write(tmp_path)
    monkeypatch.setattr(logs, "MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(logs, "is_still_writing", lambda folder: True)
    began = time.time()
    os.utime(folder.path / "result.json", (began - 3, began - 3))
    assert logs.follow_log(folder, folder.list_attempts()[-1].log_file(0)) == 0
    assert time.time() - began > 0.9
