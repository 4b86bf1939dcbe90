"""`make status`: the list of runs, and the state of a run according to its files, its process and SLURM."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from common.runs import provenance
from common.runs.folder import RunFolder, write_json
from common.runs.tracking.wandb_rows import TrackingNote, write_note
from common.system.errors import UserError
from common.system.processes import Process
from slurm.reports import cancel, logs, status, status_table
from slurm.scheduling import scheduler
from tests.harness.commands import in_process_calls
from tests.harness.runs.process_records import Popen
from tests.harness.runs.synthetic_runs import SyntheticRun
from tests.harness.slurm.fake_slurm import FakeSlurm, call_slurm, execute_module
from tests.unit.slurm.submitted_runs import write_submitted_run


def list_calls(fake: FakeSlurm, word_count: int = 1) -> list[str]:
    """Return the first words of each recorded call of SLURM's commands."""
    return [" ".join(line.split()[:word_count]) for line in fake.calls_file.read_text().splitlines()]


def answer_nothing(fake: FakeSlurm, *names: str) -> None:
    """Make commands hang."""
    for name in names:
        fake.define_command(name, "exec sleep 60")


def list_runs(folder: Path, *options: str) -> list[str]:
    """Return the lines below the head of the list, shortened to the id for runs that have finished."""
    lines = in_process_calls.call_verb("status", f"--runs-folder={folder}", *options).stdout.splitlines()[1:]
    return [line.split()[0] if "FINISHED" in line else line for line in lines]


def test_the_newest_runs_come_first_and_older_ones_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = ("mnist_pipeline", "ddp_multinode", "mnist_pipeline")
    ids = [SyntheticRun(name, number, steps=1).write(tmp_path).path.name for number, name in enumerate(experiments)]
    monkeypatch.setattr(status_table, "MAX_LISTED_RUNS", 2)
    assert list_runs(tmp_path) == [ids[2], ids[1], "not listed: 1 older run; to list all runs: make status ALL=1"]
    assert list_runs(tmp_path, "--all=1") == ids[::-1]
    json_lines = [line for line in list_runs(tmp_path, "--json=1") if "samples_per_second" in line]
    assert len(json_lines) == 3, "JSON contains all runs"


def test_the_shards_of_a_run_are_shown(tmp_path: Path) -> None:
    folder = SyntheticRun("ddp_multinode", state="running", steps=200).write(tmp_path)
    assert "shards" not in in_process_calls.call_verb("status", f"--runs-folder={tmp_path}").stdout
    attempt = folder.list_attempts()[-1]
    attempt.write_heartbeat(0, 100, time.time(), samples=96)
    attempt.write_heartbeat(1, 100, time.time(), samples=32)
    assert "shards 96+32" in in_process_calls.call_verb("status", f"--runs-folder={tmp_path}").stdout


def test_waiting_requires_a_run(tmp_path: Path) -> None:
    process = in_process_calls.call_verb("status", f"--runs-folder={tmp_path}", "--wait=abc", status=2)
    assert process.stderr.count("\n") == 1
    assert "error: WAIT requires RUN=<id>" in process.stderr


@pytest.mark.parametrize("seconds", ["abc", "²", "-1", "1.5"])
def test_an_invalid_time_to_wait_is_refused(tmp_path: Path, seconds: str) -> None:
    run = str(SyntheticRun(steps=10).write(tmp_path).path)
    process = in_process_calls.call_verb("status", f"--wait={seconds}", "--", run, status=2)
    assert process.stderr == f"error: WAIT must be a whole number of seconds (got {seconds!r})\n"


@pytest.mark.parametrize("state, exit_status", [("failed", 1), ("lost", 1), ("finished", 0)])
def test_a_failed_run_changes_the_exit_status_only_for_scripts(tmp_path: Path, state: str, exit_status: int) -> None:
    run = str(SyntheticRun(state=state).write(tmp_path).path)
    for verb, arguments in {"status": ["--", run], "doctor": [f"--run={run}"]}.items():
        in_process_calls.call_verb(verb, *arguments)
        in_process_calls.call_verb(verb, "--json=1", *arguments, status=exit_status)
    in_process_calls.call_verb("status", "--wait=1", "--", run, status=exit_status)


# ---- the state of a job


STATES_BY_ANSWERS = [
    ("echo '4711|PENDING|Resources'", "", "", "PENDING", 0),
    ("echo '4711|RUNNING|None'", "", "", "RUNNING", 0),
    ("echo '47|PENDING|None'", "", "", "RUNNING", 0),  # another job; scontrol knows that of the run
    ("echo '4711|STOPPED|Resources'", "", "", "PENDING", 0),
    ("echo '4711|SUSPENDED|Resources'", "", "", "PENDING", 0),
    ("echo '4711|SPECIAL_EXIT|Resources'", "", "", "PENDING", 0),
    ("exit 1", "echo JobId=1 JobState=RUNNING", "", "RUNNING", 0),
    ("true", "exit 1", "echo FAILED", "FAILED", 1),
    ("true", "exit 1", "echo 'CANCELLED by 0'", "CANCELLED", 0),
    ("true", "exit 1", "echo COMPLETED", "LOST", 1),
    ("true", "exit 1", "echo PREEMPTED", "PREEMPTED", 0),
    ("true", "exit 1", "exit 1", "LOST", 1),
    ("exit 1", "exit 1", "exit 1", "UNKNOWN", 0),
]


@pytest.mark.parametrize("squeue, scontrol, sacct, state, exit_status", STATES_BY_ANSWERS)
def test_squeue_scontrol_and_sacct_are_queried_in_turn(
    fake: FakeSlurm, runs: Path, squeue: str, scontrol: str, sacct: str, state: str, exit_status: int
) -> None:
    folder = write_submitted_run(runs, "4711")
    for name, body in (("squeue", squeue), ("scontrol", scontrol), ("sacct", sacct)):
        if body:
            fake.define_command(name, body)
    process = call_slurm(fake, "status", "--wait=0", str(folder.path), status=exit_status)
    assert re.search(rf"  {state}  ", process.stdout), process.stdout + process.stderr
    if state == "PENDING":
        assert process.stdout.endswith("  job 4711 Resources\n")


def test_the_queue_is_queried_once_for_all_runs(fake: FakeSlurm, runs: Path) -> None:
    for number, job in enumerate(("1", "2_0", "2_1", "3")):
        write_submitted_run(runs, job, number)
    fake.define_command("squeue", "printf '1|RUNNING|None\\n2_0|RUNNING|None\\n2_1|PENDING|JobArrayTaskLimit\\n'")
    fake.define_command("scontrol", "echo JobState=FAILED")
    process = call_slurm(fake, "status", f"--runs-folder={runs}")
    states = [line.split()[1] for line in process.stdout.splitlines()[1:]]
    assert states == ["FAILED", "PENDING", "RUNNING", "RUNNING"], process.stdout + process.stderr
    assert "job 2_1 JobArrayTaskLimit" in process.stdout
    assert list_calls(fake) == ["squeue", "scontrol"]


def test_a_hanging_controller_is_queried_once(
    fake_here: FakeSlurm, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [write_submitted_run(runs, str(number), number) for number in range(5)]
    answer_nothing(fake_here, "squeue", "scontrol", "sacct")
    monkeypatch.setattr(scheduler, "COMMAND_TIMEOUT", 3.3)
    assert {status.read_state(folder)[0] for folder in folders} == {"UNKNOWN"}
    assert list_calls(fake_here) == ["squeue", "sacct"], "scontrol would query the same controller as squeue"
    monkeypatch.setattr(scheduler, "COOLDOWN_SECONDS", 0.0)
    fake_here.define_command("squeue", "echo '3|RUNNING|None'")
    assert status.read_state(folders[3])[0] == "RUNNING"


@pytest.mark.slow
def test_runs_are_listed_within_seconds_if_slurm_does_not_answer(fake: FakeSlurm, runs: Path) -> None:
    for number in range(5):
        write_submitted_run(runs, str(number), number)
    answer_nothing(fake, "squeue", "scontrol", "sacct")
    start = time.monotonic()
    process = call_slurm(fake, "status", f"--runs-folder={runs}")
    assert process.stdout.count("UNKNOWN") == 5, process.stdout + process.stderr
    assert time.monotonic() - start < 30, "much less than a time limit of 15 s per run"
    assert list_calls(fake, word_count=2) == ["squeue -h", "scontrol ping", "sacct -n"], "one call each for all runs"


@pytest.fixture
def slow_queue(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let squeue answer after the controller was checked, and before the query times out."""
    fake.define_command("squeue", "sleep 0.5; echo '1|RUNNING|None'")
    monkeypatch.setattr(scheduler, "PING_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(scheduler, "COMMAND_TIMEOUT", 180.0)
    monkeypatch.setattr(status, "STATUS_TIMEOUT", 60.0)


@pytest.mark.usefixtures("slow_queue")
def test_the_answer_of_a_slow_controller_is_used(fake: FakeSlurm, runs: Path) -> None:
    write_submitted_run(runs, "1")
    process = call_slurm(fake, "status", f"--runs-folder={runs}")
    assert " RUNNING " in process.stdout, process.stdout
    assert list_calls(fake, word_count=2) == ["squeue -h", "scontrol ping"]


def test_status_does_not_wait_for_a_controller_that_is_down(fake_here: FakeSlurm, runs: Path) -> None:
    """SLURM's commands try for ten seconds to reach a controller that refuses them."""
    folder = write_submitted_run(runs, "1")
    answer_nothing(fake_here, "squeue", "sacct")
    fake_here.define_command("scontrol", 'echo "Slurmctld(primary) at ctl is DOWN"; exit 1')
    state, detail = status.read_state(folder, timeout=scheduler.STATUS_TIMEOUT)
    assert state == "UNKNOWN"
    assert detail == "SLURM: the controller is down", "squeue was stopped before its timeout"


@pytest.mark.usefixtures("slow_queue")
def test_a_backup_controller_replaces_the_one_that_is_down(fake: FakeSlurm, runs: Path) -> None:
    write_submitted_run(runs, "1")
    answer = "Slurmctld(primary) at first is DOWN\\nSlurmctld(backup) at second is UP\\n"
    for exit_status in (0, 1):
        fake.define_command("scontrol", f"printf '{answer}'; exit {exit_status}")
        process = call_slurm(fake, "status", f"--runs-folder={runs}")
        assert " RUNNING " in process.stdout, process.stdout


def test_the_state_of_a_job_on_another_cluster_is_unknown(fake: FakeSlurm, runs: Path) -> None:
    """Clusters that share a file system have jobs with the same ids."""
    folder = write_submitted_run(runs, "1")
    job = {"id": "1", "scheduler": "SLURM", "cluster": "first"}
    write_json(folder.path / "meta.json", {"job": job})
    fake.define_command("scontrol", "echo 'ClusterName             = second'")
    problem = "job 1 belongs to the SLURM cluster first, but this host uses second; use a login node of first, "
    problem += "or, if that cluster no longer exists, delete its name in meta.json of the run"
    output = call_slurm(fake, "status", "--", str(folder.path)).stdout
    assert " UNKNOWN " in output
    assert problem in output
    assert call_slurm(fake, "cancel", "--", str(folder.path), status=2).stderr == f"error: {problem}\n"
    assert problem in call_slurm(fake, "exp", f"--resume={folder.path}", status=2).stderr
    fake.define_command("scontrol", "echo 'ClusterName             = first'")
    fake.define_command("squeue", "echo '1|RUNNING|None'")
    assert " RUNNING " in call_slurm(fake, "status", "--", str(folder.path)).stdout


def test_a_run_that_finishes_during_a_slow_query_is_finished(fake_here: FakeSlurm, runs: Path) -> None:
    folder = write_submitted_run(runs, "1")
    result = folder.path / "result.json"
    write_result = f"""echo '{{"format": 2, "state": "finished", "exit_status": 0}}' >{result}"""
    fake_here.define_command("squeue", f"{write_result}; echo '1|COMPLETED|None'")
    assert status.read_state(folder)[0] == "FINISHED"


def test_a_run_in_an_unknown_state_may_still_be_running(fake: FakeSlurm, runs: Path) -> None:
    """Nothing is sent to W&B, and no second job starts, until SLURM answers."""
    folder = write_submitted_run(runs, "1")
    offline_run = folder.path / "wandb" / "offline-run-1"
    offline_run.mkdir(parents=True)
    (offline_run / "run.wandb").touch()
    for name in ("squeue", "scontrol", "sacct"):
        fake.define_command(name, "exit 1")
    sync = ("sync", f"--runs-folder={runs}", "--dry-run=1")
    output = call_slurm(fake, *sync).stdout
    assert f"skipped {folder.path.name}: it is not known whether the run has ended (SLURM: " in output
    assert "); run make sync again when SLURM answers\nnothing to send" in output
    for command in (["rerun", "--", str(folder.path)], ["exp", f"--resume={folder.path}"]):
        process = call_slurm(fake, *command, status=2)
        assert f"{folder.path.name} is UNKNOWN; " in process.stderr, process.stderr
    fake.define_command("sacct", "echo FAILED")
    assert call_slurm(fake, *sync).stdout == f"{offline_run}\n"


# ---- the state of a process and of the files of a run


def test_a_run_on_a_renamed_host_is_not_running_forever(tmp_path: Path, waiting_process: Popen) -> None:
    folder = SyntheticRun(steps=10, state="running").write(tmp_path)
    identity = Process.identify(waiting_process.pid)
    start = {"host": "before", "boot": provenance.read_boot_id(), "pid": identity.pid, "pid_started": identity.start}
    write_json(folder.path / "meta.json", {"history": [start]})
    long_ago = time.time() - 100_000
    for path in folder.path.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    assert status.read_state(folder) == ("RUNNING", ""), "the process is visible, although the host has a new name"

    waiting_process.kill()
    waiting_process.wait()
    attempt = folder.list_attempts()[0]
    write_note(attempt, TrackingNote())  # as `make sync` does
    state, detail = status.read_state(folder)
    assert state == "LOST"
    assert "no sign of life for 28 h" in detail
    assert "on before is not visible" in detail

    attempt.write_heartbeat(0, 10, time.time())
    assert status.read_state(folder)[0] == "RUNNING", "the run may be on another host"
    start_elsewhere = start | {"boot": "another", "pid": os.getpid()}
    write_json(folder.path / "meta.json", {"history": [start_elsewhere]})
    with pytest.raises(UserError, match="is running on before; run make cancel there"):
        cancel.cancel_run(folder)


def submit_and_kill(fake: FakeSlurm, cache: Path, runs: Path) -> RunFolder:
    """Submit a run, and kill the command before it can delete the folder or record the job."""
    fake.define_command("sbatch", "kill -9 $PPID")
    settings = f"data.name=digits data.cache={cache} runs={runs}"
    execute_module(fake, "slurm", "exp", f"--args={settings}", "--", "mnist_pipeline", status=-signal.SIGKILL)
    (path,) = runs.iterdir()
    folder = RunFolder(path)
    assert not folder.list_attempts()
    assert not json.loads((path / "meta.json").read_text()).get("job")
    return folder


def test_a_run_that_was_created_and_never_started_is_lost(fake: FakeSlurm, cache: Path, runs: Path) -> None:
    folder = submit_and_kill(fake, cache, runs)
    process = call_slurm(fake, "status", str(folder.path))
    assert "LOST" in process.stdout, process.stdout
    assert "created but never started" in process.stdout
    assert "is already LOST" in call_slurm(fake, "cancel", str(folder.path)).stdout

    provenance.write_metadata(folder, [], {})  # as if this process, which is alive, were submitting the run
    assert status.read_state(folder) == ("PENDING", "being prepared")
    process = call_slurm(fake, "cancel", str(folder.path), status=2)
    assert "is still being prepared" in process.stderr

    (folder.path / "meta.json").unlink()  # config.yaml is written first
    assert status.read_state(folder)[0] == "PENDING"
    config_file = folder.path / "config.yaml"
    long_ago = config_file.stat().st_mtime - 2 * status.PREPARATION_SECONDS
    os.utime(config_file, (long_ago, long_ago))
    assert status.read_state(folder)[0] == "LOST"


INCOMPLETE_RESULTS = [
    ('{"scores": {"test_accuracy": 0.5}}', "FAILED", "result.json does not contain a known state"),
    ('{"state": null, "exit_status": null}', "FAILED", "result.json does not contain a known state"),
    ('{"state": "finished", "scores": {"test_accuracy": null}, "timings": null}', "FINISHED", ""),
    ('{"state": "failed", "scores": {"test_accuracy": "x"}, "reason": null, "timings": "x"}', "FAILED", ""),
    ('{"state": "finished", "scores": {"test_accuracy": 0.5}}', "FINISHED", "accuracy 50.00%"),
]


@pytest.mark.parametrize("content, state, detail", INCOMPLETE_RESULTS)
def test_an_incomplete_result_does_not_prevent_the_list(tmp_path: Path, content: str, state: str, detail: str) -> None:
    folder = SyntheticRun(steps=10).write(tmp_path)
    (folder.path / "result.json").write_text(content)
    run_status = status.read_status(folder)
    assert run_status.state == state
    assert run_status.detail == detail
    assert status_table.format_status(run_status)
    assert logs.find_exit_status(folder) == 1


def test_a_damaged_result_is_reported(runs: Path) -> None:
    folder = SyntheticRun(steps=20, state="lost").write(runs)
    (folder.path / "result.json").write_text('{"state": "fini')
    state, detail = status.read_state(folder)
    assert state == "LOST"
    assert detail.startswith("result.json is damaged; "), detail
