"""`sweep=true`: a stop request or a refused run ends it, and it starts its runs itself."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from common.runs.folder import read_json
from common.system.errors import UserError
from slurm.launch import experiment_sweep, sweep

NAME, WORDS = "resnet_dataparallel", ["repeats=1", "data.name=digits"]


def sweep_runs(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> int:
    """Sweep with a shell script in the place of each run; its folder is $RUN."""

    def start(folder: object) -> subprocess.Popen[bytes]:
        path = shlex.quote(str(folder.path))  # type: ignore[attr-defined]
        return subprocess.Popen(["sh", "-c", f"RUN={path}; {script}"])

    monkeypatch.setattr(sweep, "start_local_run_of_point", start)
    return experiment_sweep.main(NAME, [*WORDS, f"data.cache={cache}", f"runs={tmp_path}", "sweep=true"])


@pytest.mark.parametrize(("name", "status"), [("INT", 130), ("USR2", 140), ("TERM", 143)])
def test_a_stop_request_at_the_end_of_a_run_ends_the_sweep(
    name: str,
    status: int,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    number = signal.Signals[f"SIG{name}"]
    before = signal.signal(number, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    result = """echo '{"format": 2, "state": "finished", "exit_status": 0}' >$RUN/result.json"""
    script = f"{result}; kill -{name} {os.getpid()}"
    assert sweep_runs(tmp_path, cache, monkeypatch, script) == status
    assert signal.signal(number, before) is signal.default_int_handler
    told = capfd.readouterr()
    assert "FINISHED" in told.out
    assert re.fullmatch(r"the sweep was stopped after 1 of \d+ runs; a new sweep runs all points again\n", told.err)
    (folder,) = (tmp_path / "sweeps").iterdir()
    (cell,) = read_json(folder / "sweep.json")["cells"]
    assert cell["state"] == "finished" and cell["run"] in (folder / "table.csv").read_text()


@pytest.mark.parametrize("status", [75, 130])
def test_a_run_that_is_stopped_ends_the_sweep(
    status: int,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that has failed before is not listed as stopped."""
    end = """echo '{"format": 2, "state": "'$STATE'", "exit_status": '$STATUS'}' >$RUN/result.json; exit $STATUS"""
    failed = f"mkdir {tmp_path / 'failed'} 2>/dev/null && STATE=failed STATUS=1 || STATE=cancelled STATUS={status}"
    assert sweep_runs(tmp_path, cache, monkeypatch, f"{failed}; {end}") == status
    _, stopped = sorted(tmp_path.glob(f"{NAME}-*"), key=lambda path: path.stat().st_mtime_ns)
    first_line, *lines = capsys.readouterr().err.splitlines()
    assert first_line.startswith("the sweep was stopped after 0 of ")
    remedy = f"no checkpoint found; to restart from step 0: make exp RESUME={stopped}"
    assert lines == [f"{stopped.name}: {remedy}"]


def test_a_run_that_has_trained_is_never_deleted(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "mkdir -p $RUN/attempts/0001; echo 'error: attempt 1 was superseded' >$RUN/screen.log; exit 2"
    assert sweep_runs(tmp_path, cache, monkeypatch, script) == 1
    runs = list(tmp_path.glob(f"{NAME}-*"))
    assert runs and all((run / "screen.log").exists() for run in runs)


def test_a_run_that_is_refused_ends_the_sweep_with_its_error(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"^no GPU is visible$"):
        sweep_runs(tmp_path, cache, monkeypatch, "echo 'error: no GPU is visible' >$RUN/screen.log; exit 2")
    assert not list((tmp_path / "sweeps").iterdir()) and not list(tmp_path.glob(f"{NAME}-*"))


@pytest.mark.parametrize("words", [["--resume=runs/x"], []])
def test_a_sweep_of_ranks_or_a_resumed_run_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not words:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="with srun, torchrun, RESUME, or --resume"):
        experiment_sweep.main(NAME, [*WORDS, *words, f"runs={tmp_path}", "sweep=true"])
