"""make doctor: faults of hosts, and the causes of failed and hanging runs."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import config
from common.runs import provenance
from common.runs.failures import Failure, read_failure, write_failure
from common.runs.folder import RunFolder, write_json
from common.system.causes import Cause
from common.system.errors import UnreachableError
from common.system.foreign_text import classify_recorded_text
from common.training import attempt
from common.training.host_checks import find_problems
from configs.profile import Profile
from slurm.reports import diagnosis, rank_logs
from slurm.reports import doctor as checks
from slurm.reports.heartbeats import Heartbeat, find_slow_rank
from slurm.scheduling.job_failures import record_job_failure
from slurm.scheduling.scheduler import Scheduler
from tests.harness.commands import in_process_calls
from tests.harness.commands.doctor_reports import leave_out_speed_problems
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    Settings,
    execute_verb,
    find_processes,
    get_only_run,
    write_script,
)
from tests.harness.commands.processes import run_experiment as experiment
from tests.harness.runs.long_runs import list_rank_pids, start_long_run
from tests.harness.runs.synthetic_runs import SyntheticRun

SOUND: dict[str, Any] = yaml.safe_load(
    """
    {host: node1, rank: 0, address: 10.0.0.1, versions: {torch: 2.15.0, numpy: '2.4'}, device: cpu, cores: 4,
    cores_asked: 4, disk_free_gb: 50.0, all_reduce_right: true, disk_mb_per_s: 90, disk_error: '', gflop_per_s: 50.0,
    product_finite: true, product_same: true, data: {digits-1: ab12}, data_damaged: [], times: [100.0, 101.0, 102.0]}
    """
)


def describe_three_hosts() -> list[dict[str, Any]]:
    return [SOUND | {"host": f"node{rank + 1}", "rank": rank} for rank in range(3)]


HOST_FAULTS = {
    "": "",
    "versions: {torch: 2.11.0, numpy: '2.4'}": "node3 (rank 2) has torch 2.11.0, but other ranks have",
    "address: ''": "node3 (rank 2) cannot resolve its own name",
    "address: 127.0.1.1": "node3 (rank 2) resolves its own name to 127.0.1.1",
    "device: H200": "node3 (rank 2) has H200, but other ranks have cpu",
    "cores: 1": "node3 (rank 2) can use only 1 of the 4 requested cores",
    "disk_free_gb: 0.1": "node3 (rank 2) has only 0.1 GB free",
    "disk_free_gb: null": "node3 (rank 2) cannot access the disk of the run folders",
    "all_reduce_right: false": "node3 (rank 2) got a wrong sum",
    "product_same: false": "node3 (rank 2) computed different or infinite products",
    "product_finite: false": "node3 (rank 2) computed different or infinite products",
    "gflop_per_s: 24.0": "node3 (rank 2) is slow: matrix products at 24.0 GFLOP/s, compared with 50.0",
    "gflop_per_s: 26.0": "",
    "disk_error: 'cannot write /r: the disk is full', disk_free_gb: 0.0": "node3 (rank 2) cannot write /r",
    "disk_mb_per_s: 2": "node3 (rank 2) writes run folders at only 2 MB/s",
    "disk_mb_per_s: 0": "node3 (rank 2) writes run folders at only 0 MB/s",
    "data: {digits-1: ffff}": "node3 (rank 2): the data set digits-1 is missing or differs",
    "data: {}": "node3 (rank 2): the data set digits-1 is missing or differs",
    "data_damaged: [/d/x.npy]": "node3 (rank 2): /d/x.npy is damaged",
    "times: [130.0, 131.0, 132.0]": "node3 (rank 2): its clock differs by +30.0 s from other hosts",
    "times: [130.0, 101.0, 132.0]": "",
}


def test_hosts_are_checked_with_the_resources_and_commands_of_a_job() -> None:
    setup = ["GREETING=hello"]
    command = checks.make_srun_command(Profile(memory_gb=2, wckey="team", setup=setup), 2, "doctor-1")
    assert {"--mem=2048M", "--wckey=team"} < set(command)
    shell = command[command.index("bash") :]
    printed = subprocess.run([*shell, "sh", "-c", "echo $0 $1", "a b", "c"], capture_output=True, text=True, check=True)
    assert printed.stdout == "a b c\n"
    assert "GREETING=hello\n" in shell[2]
    in_container = checks.make_srun_command(Profile(setup=setup, container=["--container-image=a.sqsh"]), 2, "doctor-1")
    assert in_container[-1] == "--container-image=a.sqsh"


def test_ctrl_c_ends_a_check_of_a_host_that_does_not_respond() -> None:
    seconds = f"600.{os.getpid()}"  # identifies the process
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            checks.run_ranks_and_read_report(["sleep", seconds], None, "")
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, previous)
    assert not find_processes(f"sleep\0{seconds}\0")


@pytest.mark.parametrize("fault, message", HOST_FAULTS.items())
def test_the_host_with_the_fault_is_named(fault: str, message: str) -> None:
    facts = describe_three_hosts()
    facts[2] |= yaml.safe_load(f"{{{fault}}}")
    problems = find_problems(facts, 3)
    assert len(problems) == bool(message)
    assert message in "".join(problems)


def test_another_device_is_a_fault_unless_devices_are_mixed() -> None:
    facts = describe_three_hosts()
    facts[2] |= {"device": "NVIDIA H200", "gflop_per_s": 50_000.0}
    remedy = "use hosts with the same devices, or set launch.mixed=true"
    assert find_problems(facts, 3) == [f"node3 (rank 2) has NVIDIA H200, but other ranks have cpu; {remedy}"]
    assert find_problems(facts, 3, mixed=True) == [], "a CPU may be slower than a GPU"
    facts[1] |= {"gflop_per_s": 24.0}
    assert find_problems(facts, 3, mixed=True)[0].startswith("node2 (rank 1) is slow: matrix products at 24.0")


@pytest.mark.parametrize("ranks_per_host", [1, 2, 3])
@pytest.mark.parametrize("skew", [-1.8, 90.0, 0.9])
def test_both_of_two_hosts_with_different_clocks_are_named(ranks_per_host: int, skew: float) -> None:
    facts = [SOUND | {"rank": rank} for rank in range(ranks_per_host)]
    times = [second + skew for second in (100.0, 101.0, 102.0)]
    skewed = SOUND | {"host": "node2", "times": times}
    facts += [skewed | {"rank": ranks_per_host + rank} for rank in range(ranks_per_host)]
    expected = []
    if abs(skew) > 1:
        hosts = f"node2 (rank {ranks_per_host}) and node1 (rank 0)"
        expected.append(f"{hosts}: their clocks differ by {skew:+.1f} s; set up NTP")
    assert find_problems(facts, 2) == expected


def test_the_ranks_of_one_host_do_not_outvote_the_other_hosts() -> None:
    facts = describe_three_hosts()
    facts[2] |= {"times": [130.0, 131.0, 132.0]}
    for rank in (3, 4):
        facts.append(facts[2] | {"rank": rank})
    assert find_problems(facts, 3) == ["node3 (rank 2): its clock differs by +30.0 s from other hosts; set up NTP"]


def doctor(*arguments: str, status: int = 0) -> str:
    """Run make doctor, check its exit status, and return its output."""
    return in_process_calls.call_verb("doctor", *arguments, status=status).stdout


def make_failed_run(tmp_path: Path, reason: str = "", **result: str) -> RunFolder:
    return SyntheticRun(state="failed", result={"reason": reason, **result}).write(tmp_path)


@pytest.mark.slow
def test_a_damaged_data_set_is_named(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path / "prepared")
    (file,) = (tmp_path / "prepared").glob("digits-*/test_labels.npy")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    settings = f"runs={tmp_path / 'runs'} data.cache={tmp_path / 'prepared'}"
    arguments = ("doctor", "--nodes=2", "--json=1", f"--args={settings}")
    completed = execute_verb(*arguments, timeout=WAIT_TIMEOUT, status=1)
    report = json.loads(completed.stdout)
    assert [host["rank"] for host in report["hosts"]] == [0, 1]
    assert not report["sound"]
    (problem,) = leave_out_speed_problems(report["problems"])
    assert f"{file} is damaged" in problem
    for host in report["hosts"]:
        assert host["memory_free_gb"] > 0, "the memory of a host without a GPU is measured"
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_that_diverged_is_explained(digits: Settings, tmp_path: Path) -> None:
    settings = ("optim.lr=100", "optim.weight_decay=10", "optim.decay=constant", "steps=60")
    run = experiment("mnist_pipeline", *digits, *settings, runs=tmp_path, status=2)
    report = doctor(f"--run={run.folder.path}")
    assert "training diverged; lower optim.lr" in report
    assert "the loss of step" in report
    assert 'ARGS="optim.lr=50" (lower than the current learning rate, 100)' in report
    newest_attempt = run.folder.list_attempts()[-1]
    for rank in (0, 1):
        failure = read_failure(newest_attempt, rank)
        assert failure
        assert failure.cause == Cause.DIVERGED
    facts = json.loads(doctor(f"--run={run.folder.path}", "--json=1", status=1))
    assert facts["state"] == "failed"
    assert facts["first_error"]["rank"] in (0, 1)
    assert len(facts["ranks"]) == 2
    completed = in_process_calls.call_verb("status", "--json=1", "--", str(run.folder.path), status=1)
    (status,) = json.loads(completed.stdout)
    assert facts["step"] == status["step"]
    assert facts["first_error"]["step"] > 1, "a failing rank records its last step"


def test_a_rank_that_was_killed_is_named(digits: Settings, tmp_path: Path) -> None:
    settings = (*digits, "steps=100000", "epochs=300", "log.progress=none")
    with start_long_run("mnist_pipeline", *settings, runs=tmp_path) as process:
        folder = get_only_run(tmp_path)
        os.kill(list_rank_pids(process)[1], signal.SIGKILL)
        process.wait(WAIT_TIMEOUT)
    report = doctor(f"--run={folder.path}")
    assert re.search("likely cause  .*rank 1 was killed by SIGKILL", report), report
    assert folder.result["cause"] == "killed"
    assert "stuck at " not in report, report


def test_an_error_without_a_time_is_not_the_first() -> None:
    ranks = []
    for rank, error_time in enumerate(("", "2026-01-01 09:00:02,500", "2026-01-01 09:00:02,100")):
        heartbeat = Heartbeat(rank, "vm", 1, 1.0, None)
        ranks.append(diagnosis.RankFacts(heartbeat, 1.0, error_time, "an error", ""))
    failed_ranks = diagnosis.list_failed_ranks(ranks)
    assert [facts.heartbeat.rank for facts in failed_ranks] == [2, 1, 0]


def test_a_rank_that_the_kernel_killed_for_memory_is_explained(tmp_path: Path) -> None:
    folder = SyntheticRun(steps=10, state="failed").write(tmp_path)
    reason = "rank 1 was killed by SIGKILL: the system ran out of memory"
    write_json(folder.path / "result.json", {"state": "failed", "exit_status": 137, "reason": reason})
    report = doctor(f"--run={folder.path}")
    assert "likely cause  out of memory; lower batch" in report, report
    assert "on a machine with more memory, or start a new run with a smaller batch or model" in report, report


ADVICE_BY_REASON = {
    "the loss of step 3 is nan": 'RESUME={} ARGS="optim.lr=0.05"',
    "rank 1 was killed by SIGKILL: the system ran out of memory": "RESUME={} on a machine with more memory, or",
    "no valid checkpoint left (attempt 1 step 2); repair one": "RESUME={} after removing {}/attempts/*/checkpoints",
    "rank 1 was killed by SIGKILL": "make exp RESUME={}",
    "rank 1 failed: RuntimeError: Connection closed by peer": "make exp RESUME={}",
    "rank 1 failed: TypeError: of x": 'fix the error, then start a new run: make exp NAME=ddp_multinode ARGS="..."\n'
    "RESUME= would use the old source in {}/code",
}


@pytest.mark.parametrize("reason, advice", ADVICE_BY_REASON.items())
def test_the_last_line_of_a_run_says_how_to_continue(reason: str, advice: str, tmp_path: Path) -> None:
    folder = make_failed_run(tmp_path, reason)
    cfg = config.load_config(config.import_schema("ddp_multinode"), ["optim.lr=0.1"], {})
    last_lines = attempt.describe_continuation(folder, cfg, classify_recorded_text(reason))
    assert advice.replace("{}", str(folder.path)) in last_lines
    beginning = "fix "
    if "RESUME={}" in advice:
        beginning = "no checkpoint found; to restart from step 0: "
    assert last_lines.startswith(beginning)
    report = doctor(f"--run={folder.path}")
    assert ("after removing" in report) == ("no valid checkpoint" in reason), report


def test_a_rank_that_did_not_answer_is_the_cause_of_a_later_kill(tmp_path: Path) -> None:
    """NCCL aborts the process that waits."""
    folder = make_failed_run(tmp_path, "rank 0 was killed by SIGABRT")
    message = "after step 9: rank 1 on vm did not answer within 9 s"
    folder.list_attempts()[-1].log_file(0).write_text(f"2026-01-01 09:00:02,500 ERROR {message}\n")
    assert diagnosis.collect_diagnosis(folder)["cause"] == message


SOURCE_ERRORS = {
    "ValueError: of x": True,
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied": True,
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": False,
    "OSError: Input/output error": False,
    "microbatches=3 does not divide the batch": False,
}


@pytest.mark.parametrize("error, is_source_error", SOURCE_ERRORS.items())
def test_a_run_with_an_error_in_its_source_is_not_resumed(tmp_path: Path, error: str, is_source_error: bool) -> None:
    folder = make_failed_run(tmp_path)
    folder.list_attempts()[-1].log_file(1).write_text(f"2026-01-01 09:00:02,500 ERROR after step 3: {error}\n")
    expected = f"make exp RESUME={folder.path} (no checkpoint found; the run restarts from step 0)"
    if is_source_error:
        reason = f"RESUME= would use the old source in {folder.path}/code"
        expected = f'make exp NAME=ddp_multinode ARGS="..." after fixing the error ({reason})'
    report = doctor(f"--run={folder.path}")
    assert report.count("continue with  ") == 1
    assert f"continue with  {expected}" in report


@pytest.mark.parametrize("damaged", [False, True])
def test_the_ranks_that_an_elastic_run_lost_are_listed(damaged: bool, tmp_path: Path) -> None:
    folder = SyntheticRun().write(tmp_path)
    first = {"step": 16, "lost": [1], "joined": [], "ranks": [0, 2, 3], "seconds": 0.05}
    second = {"step": 20, "lost": [2, 3], "joined": [], "ranks": [0], "seconds": 0.05}
    changes = ["damaged"] if damaged else [first, second]
    write_json(folder.list_attempts()[-1].attempt_folder / "generations.json", changes)
    report = doctor(f"--run={folder.path}")
    for message in (
        "  ranks changed: after step 16: lost rank 1; ranks 0, 2, 3 continued after 0.050 s",
        "  ranks changed: after step 20: lost ranks 2, 3; rank 0 continued after 0.050 s",
    ):
        assert (message in report) is not damaged


def test_a_cancelled_run_needs_no_cause(tmp_path: Path) -> None:
    folder = make_failed_run(tmp_path, "stopped by Ctrl-C", state="cancelled")
    report = doctor(f"--run={folder.path}")
    assert "is CANCELLED: stopped by Ctrl-C\n" in report
    assert "likely cause" not in report
    assert f"continue with  make exp RESUME={folder.path} (no checkpoint found; the run restarts" in report
    assert json.loads(doctor(f"--run={folder.path}", "--json=1"))["state"] == "cancelled"


def test_a_slow_rank_of_a_finished_run_is_a_note(tmp_path: Path) -> None:
    folder = make_failed_run(tmp_path, state="finished")
    attempt = folder.list_attempts()[-1].attempt_folder
    for rank, seconds in ((0, 0.2), (1, 0.01)):
        write_json(attempt / f"heartbeat-{rank}.json", {"step": 9, "time": 1.0, "before_backward": seconds})
    report = doctor(f"--run={folder.path}")
    assert re.search("  note  rank 0 on .* is slow: backward starts after 200.0 ms", report), report
    assert "likely cause" not in report


SLURM_JOB = {"job": {"id": "7", "scheduler": "SLURM"}}
CLOSED_CONNECTION = "RuntimeError: Connection closed by peer"
NETWORK_ERROR = "torch.distributed.DistNetworkError: all_reduce: "


ENDED = "rank 0 on vm ended without an error message"
KILLED_OR_FAILED = "(it may have been killed or run out of memory, or its host may have failed)"
FAILED_FIRST = "rank 0 on vm failed first: after step 3: "
MISSING_PACKAGE = "rank 0 on vm: a Python package is missing; to check all hosts: make doctor"
SILENT = "rank 1 on vm did not answer within 8 s"
OUT_OF_MEMORY = "09:00:02,100 OutOfMemoryError: CUDA out of memory."
NO_MEETING = "rank 0 on vm, through which the others meet, does not answer"
ERRORS_OF_RANKS = [
    ("", CLOSED_CONNECTION, 1, f"{ENDED} {KILLED_OR_FAILED}"),
    ("", f"{NETWORK_ERROR}rank 0 has closed its connection; see its log", 1, ENDED),
    ("09:00:02,500 KeyError: x", f"{NETWORK_ERROR}the connection with rank 0 failed: x", 0, FAILED_FIRST),
    (f"09:00:02,500 {CLOSED_CONNECTION}", OUT_OF_MEMORY, 1, "rank 1 on vm: out of mem"),
    ("09:00:01,000 ValueError: of x", "09:00:02,000 KeyError: y", 0, f"{FAILED_FIRST}V"),
    ("09:00:01,000 UserError: the disk is full", CLOSED_CONNECTION, 0, "rank 0 on vm: the disk is full; free up space"),
    ("09:00:01,000 ModuleNotFoundError: x", "", 0, MISSING_PACKAGE),
    (f"09:00:01,000 {SILENT}", f"09:00:09,000 {NO_MEETING}", 0, f"after step 3: {SILENT}"),
]


@pytest.mark.parametrize("error_0, error_1, first, cause", ERRORS_OF_RANKS)
def test_the_first_error_of_all_ranks_counts(
    tmp_path: Path, error_0: str, error_1: str, first: int, cause: str
) -> None:
    folder = make_failed_run(tmp_path)
    for rank, error in enumerate((error_0, error_1)):
        log = "it began\n"
        if error:
            timed_error = error if error.startswith("09:") else f"09:00:03,000 {error}"
            time_of_day, _, message = timed_error.partition(" ")
            stack = "Traceback (most recent call last):\n"
            log = f"2026-01-01 {time_of_day} ERROR after step 3: {message}\n{stack}"
        folder.list_attempts()[-1].log_file(rank).write_text(log)
    report = diagnosis.collect_diagnosis(folder)
    assert report["cause"].startswith(cause), report
    assert report["first_error"]["error"].startswith("after step 3: ")
    assert report["first_error"]["rank"] == first


def test_a_recorded_cause_counts_more_than_messages(tmp_path: Path) -> None:
    folder = make_failed_run(tmp_path, cause="other")
    attempt_of_run = folder.list_attempts()[-1]
    attempt_of_run.log_file(1).write_text("2026-01-01 09:00:00,500 ERROR after step 3: ValueError: of an old log\n")
    lost_peer = Failure(Cause.LOST_PEER, "after step 3: OddError: gone", 3.25)
    write_failure(attempt_of_run, 0, lost_peer)
    other_failure = Failure(Cause.OTHER, "after step 3: OddError: the loss of step 3", 4.5)
    write_failure(attempt_of_run, 1, other_failure)
    report = diagnosis.collect_diagnosis(folder)
    assert report["cause"] == "rank 1 on vm failed first: after step 3: OddError: the loss of step 3"
    assert report["cause_kind"] == "other"
    assert report["first_error"]["rank"] == 0
    assert f"continue with  make exp RESUME={folder.path}" in doctor(f"--run={folder.path}")
    out_of_memory = Failure(Cause.OUT_OF_MEMORY, "after step 3: OddError", 4.5)
    write_failure(attempt_of_run, 1, out_of_memory)
    report = diagnosis.collect_diagnosis(folder)
    assert report["cause"].startswith("rank 1 on vm: out of memory; lower batch")
    assert "on a machine with more memory" in doctor(f"--run={folder.path}")


def test_the_rank_with_the_fewest_steps_is_the_one_that_hangs(tmp_path: Path) -> None:
    folder = SyntheticRun(state="running", steps=200).write(tmp_path)
    assert diagnosis.collect_diagnosis(folder)["cause"] == diagnosis.NO_PROBLEM
    hangs = "the run hangs after step 100: no sign of life from rank 1 on vm for 2 min"
    for seconds, cause in ((100, diagnosis.NO_PROBLEM), (130, hangs)):
        for rank, step in ((0, 2), (1, 1)):  # a message may take launch.step_timeout=120 seconds
            heartbeat_time = time.time() - seconds - rank
            folder.list_attempts()[-1].write_heartbeat(rank, step, heartbeat_time)
        assert diagnosis.collect_diagnosis(folder)["cause"].startswith(cause)
    assert "\n  last step  100\n" in doctor(f"--run={folder.path}"), "the metrics are newer than the heartbeats"


@pytest.mark.parametrize(
    "timeout, seconds, hangs", [(120, 100, False), (120, 130, True), (15, 40, False), (15, 70, True)]
)
def test_a_run_that_hangs_before_its_first_heartbeat_is_reported(
    tmp_path: Path, timeout: int, seconds: float, hangs: bool
) -> None:
    settings = {"launch.step_timeout": str(timeout)}
    folder = SyntheticRun(state="running", settings=settings).write(tmp_path)
    newest_attempt = folder.list_attempts()[-1]
    attempt_folder = newest_attempt.attempt_folder
    (attempt_folder / "heartbeat-1.json").unlink()
    newest_attempt.write_heartbeat(0, 1, time.time() - seconds)
    start = time.time() - seconds - 5
    logs = attempt_folder / "logs"
    paths = [logs, *logs.glob("*")]
    paths += [attempt_folder / "attempt.json", attempt_folder / "world.json"]
    for path in paths:
        os.utime(path, (start, start))
    message = "the run hangs after step 100: no sign of life from rank 1 on vm for "
    report = diagnosis.collect_diagnosis(folder)
    assert report["cause"].startswith(message if hangs else diagnosis.NO_PROBLEM)
    (attempt_folder / "heartbeat-0.json").unlink()  # no rank has completed a step
    report = diagnosis.collect_diagnosis(folder)
    assert report["cause"].startswith("the run hangs after step " if hangs else diagnosis.NO_PROBLEM)
    assert diagnosis.print_diagnosis(folder, as_json=True) == int(hangs)


DAMAGED = "the certificate in /x is damaged (BAD); restart the run"


CAUSES_BY_OUTPUT = [
    (f"error: {DAMAGED}", "other", "damaged_data"),
    (f"Traceback\n  File x\ncommon.system.errors.UserError: {DAMAGED}", "other", "damaged_data"),
    (f"2026-01-01 09:00:02,500 ERROR after step 3: {DAMAGED}", "other", "damaged_data"),
    ("Traceback\n  File x\nModuleNotFoundError: No module named 'torch'", "missing_package", "missing_package"),
    ("2026-01-01 09:00:02,500 ERROR in a hook:\nOSError: No space left on device", "disk_full", "disk_full"),
]


@pytest.mark.parametrize("output, cause, old_cause", CAUSES_BY_OUTPUT)
def test_messages_of_this_project_are_searched_only_in_logs_of_older_versions(
    tmp_path: Path, output: str, cause: str, old_cause: str
) -> None:
    folder = make_failed_run(tmp_path, cause="other")
    job = {"id": "7", "scheduler": "SLURM"}
    (folder.path / "submit").mkdir()
    (folder.path / "submit/7_1_log.out").write_text(f"{rank_logs.JOB_START}\n{output}\n")
    write_json(folder.path / "meta.json", {"job": job})
    assert diagnosis.collect_diagnosis(folder)["cause_kind"] == old_cause
    for number in (provenance.METADATA_FORMAT, provenance.METADATA_FORMAT + 1):
        write_json(folder.path / "meta.json", {"format": number, "job": job})
        report = diagnosis.collect_diagnosis(folder)
        assert report["cause_kind"] == cause
        assert report["first_error"]["rank"] == 1


def test_a_rank_of_a_job_that_failed_before_it_trained_has_a_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_failed_run(tmp_path, cause="other")
    (folder.path / "submit").mkdir()
    attempt_of_run = folder.list_attempts()[-1]
    now = provenance.format_utc_now()
    claim = {"process": provenance.identify_process(), "time": now, "starter": "slurm 7", "restart": 0}
    write_json(attempt_of_run.attempt_folder / "claim.json", claim)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    unreachable = Failure.from_error(UnreachableError("rank 1 is missing"))
    record_job_failure(folder, 0, unreachable, is_refusal=True)
    disk_full = Failure.from_error(OSError(errno.ENOSPC, "x"))
    record_job_failure(folder, 1, disk_full, is_refusal=False)
    report = diagnosis.collect_diagnosis(folder)
    assert report["cause_kind"] == "disk_full"
    assert report["cause"].startswith("rank 1 on vm: the disk is full")
    assert [rank["error"] for rank in report["ranks"]] == ["rank 1 is missing", "OSError: [Errno 28] x"]
    earlier = Failure(Cause.OUT_OF_MEMORY, "before this attempt", provenance.parse_utc_time(now) - 9)
    record_job_failure(folder, 1, earlier, is_refusal=False)
    report = diagnosis.collect_diagnosis(folder)
    assert [rank["error"] for rank in report["ranks"]] == ["rank 1 is missing", ""]

    seconds = provenance.parse_utc_time(now)
    failure_of_rank = Failure(Cause.OTHER, "after step 3: OddError", seconds + 1)
    write_failure(attempt_of_run, 0, failure_of_rank)
    failure_of_task = Failure(Cause.OTHER, "OddError", seconds + 2)
    record_job_failure(folder, 0, failure_of_task, is_refusal=False)
    report = diagnosis.collect_diagnosis(folder)
    assert report["ranks"][0]["error"] == "after step 3: OddError"

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    refusal = Failure(Cause.OTHER, "the data has changed", seconds + 3)
    record_job_failure(folder, 0, refusal, is_refusal=True)
    report = diagnosis.collect_diagnosis(folder)
    assert report["ranks"][0]["error"] == "the data has changed", "no second attempt began"


EXITING_OPTIMIZER = """
import sys
import torch


class Leaves(torch.optim.SGD):
    def step(self):
        is_real_model = sum(p.numel() for group in self.param_groups for p in group["params"]) > 5000
        if is_real_model and torch.distributed.get_rank() == 1:
            sys.exit(3)
        super().step()
"""


def test_a_rank_that_exits_without_an_error_message_is_named(digits: Settings, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(EXITING_OPTIMIZER)
    settings = (f"optim.name={tmp_path / 'own.py'}:Leaves", "steps=4")
    run = experiment("ddp_multinode", *digits, *settings, runs=tmp_path / "runs", status=1)
    assert run.folder.result["cause"] == "exited", run.stderr
    report = doctor(f"--run={run.folder.path}")
    assert re.search(r"likely cause  rank 1 .*: after step 0: exited with status 3 without an error message", report)


def test_an_error_of_an_earlier_start_of_the_job_is_ignored(tmp_path: Path) -> None:
    """SLURM appends the output of all starts of a job to one file."""
    folder = SyntheticRun(attempts=2).write(tmp_path)
    write_json(folder.path / "meta.json", SLURM_JOB)
    job_log = folder.path / "submit/7_1_log.out"
    job_log.parent.mkdir()
    start = "submitit INFO (2026-01-01 00:00:00,000) - Starting with JobEnvironment(job_id=7, hostname=vm)\n"
    error = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n"
    job_log.write_text(start + error + start)
    assert diagnosis.collect_diagnosis(folder)["first_error"] is None
    job_log.write_text(start + start + error)  # the log of the rank may not contain the error
    assert diagnosis.collect_diagnosis(folder)["first_error"]["error"] == "RuntimeError: Connection closed by peer"


def check_slow_rank(milliseconds: tuple[float, ...], samples: tuple[int | None, ...], slow: int | None) -> None:
    """Check which rank is slow, given the time of a step and the samples of each rank."""
    ranks = []
    for rank, duration in enumerate(milliseconds):
        ranks.append(Heartbeat(rank, "vm", 100, 1.0, duration / 1e3, samples[rank]))
    slowest = find_slow_rank(ranks)
    assert (slowest and slowest.rank) == slow


@pytest.mark.parametrize(
    "milliseconds, slow",
    [((0.2, 0.9), None), ((0.2, 1.3), 1), ((10.0, 12.0), None), ((10.0, 13.0), 1), ((3.0, 10.0, 3.1), 1)],
)
def test_the_jitter_of_short_steps_is_no_straggler(milliseconds: tuple[float, ...], slow: int | None) -> None:
    check_slow_rank(milliseconds, (None,) * len(milliseconds), slow)


TIMES_WITH_SAMPLES = [
    ((30.0, 10.0), (96, 32), None),
    ((30.0, 10.0), (48, 48), 0),
    ((30.0, 10.0), (None, None), 0),
    ((20.0, 30.0, 10.0), (64, 32, 32), 1),
    ((30.0, 1.0), (96, 0), 0),
]


@pytest.mark.parametrize("milliseconds, samples, slow", TIMES_WITH_SAMPLES)
def test_a_rank_with_more_samples_is_no_straggler(
    milliseconds: tuple[float, ...], samples: tuple[int | None, ...], slow: int | None
) -> None:
    check_slow_rank(milliseconds, samples, slow)


def test_the_reason_why_a_host_is_down_may_contain_any_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_script(tmp_path / "sinfo", "echo 'node1|idle|none'; echo 'node2|drained|disk | see ticket | 7'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = Scheduler("SLURM")
    expected = "node2 is drained: disk | see ticket | 7; SLURM does not start jobs on this host"
    assert checks.describe_down_hosts(slurm, 2, "") == [expected]
    assert checks.describe_down_hosts(slurm, 1, "") == []


INVALID_ARGUMENTS = {
    "--run=nothing": "'nothing': no such run folder",
    "--run=": "RUN is missing; set RUN=<id>",
    "--nodes=x": "NODES must be an integer from 1 to",
    "--args=--help": "ARGS: --help is not a setting",
    "'--args=runs=x optim.lr=3'": "doctor does not use optim.lr; use only runs, data.cache, launch.device, launch.",
    "--args=rums=x": "unknown key rums; did you mean runs?",
    "--json=2": "JSON must be 0 or 1 (got '2')",
    "--run=0000 --nodes=2": "RUN diagnoses a run, but NODES applies to checks of hosts",
}


@pytest.mark.parametrize("arguments, message", INVALID_ARGUMENTS.items())
def test_invalid_arguments_are_refused(arguments: str, message: str) -> None:
    completed = in_process_calls.call_verb("doctor", *shlex.split(arguments), status=2)
    assert message in completed.stderr


def test_the_exit_code_of_a_rank_is_read_from_srun(tmp_path: Path) -> None:
    folder = make_failed_run(tmp_path, "cluster.requeue=false")
    write_json(folder.path / "meta.json", SLURM_JOB)
    job_log = folder.path / "submit/7_0_log.out"
    job_log.parent.mkdir()
    error = "2026-01-01 09:00:02,500 ERROR RuntimeError: Connection closed by peer\n"
    srun = "srun: error: node2: task 1: Exited with exit code 3\nsrun: error: node1: tasks 0-1: Killed\n"
    job_log.write_text(f"{rank_logs.JOB_START}\n{error}{srun}")
    expected = "rank 1 on vm ended without an error message (Exited with exit code 3)"
    cause = diagnosis.collect_diagnosis(folder)["cause"]
    assert cause == f"{expected}; the other ranks then lost their connections"
    job_log.unlink()
    write_json(folder.path / "result.json", {"state": "failed", "exit_status": 137})
    assert diagnosis.collect_diagnosis(folder)["cause"] == "all ranks ended without an error message: signal Killed"


def test_frames_of_installed_packages_are_omitted_from_a_stack() -> None:
    frames = ["torch/distributed/x.py", "/r/code/common/techniques/pipeline/stage_messages.py"]
    frames.append("/v/site-packages/submitit/slurm/slurm.py")
    lines = [f'  File "{path}", line {number} in f\n' for number, path in enumerate(frames)]
    dump = f"Timeout (0:00:08)!\nThread 0x1 (most recent call first):\n{''.join(lines)}"
    assert rank_logs.find_stack_position(dump) == "x.py:0 f < stage_messages.py:1 f"
