"""Commands and failures of runs on GPUs: launchers, evaluation, repetition, stop requests, and hanging ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.checkpoint import storage
from common.system.exit_status import EXIT_REFUSED, EXIT_RESUMABLE
from tests.harness.commands import execution
from tests.harness.commands.execution import Command, kill_session
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    FinishedRun,
    Settings,
    execute_verb,
    get_only_run,
    make_run_command,
    wait_until,
)
from tests.harness.experiments.registry import REPLICATED_ENTRY, STAGED_ENTRY, Entry
from tests.harness.gpu.gpu_runs import (
    DEVICE,
    FLOAT64_TOLERANCE,
    check_logs,
    check_world,
    compare_losses,
    make_gpu_command,
    make_gpu_environment,
    resume_on_gpu,
    train_on_gpu,
    train_without_sharing,
)
from tests.harness.runs.long_runs import ENDLESS_SETTINGS, find_free_port, has_metrics, list_rank_pids

ON_GPU = f"launch.device={DEVICE}"
ONE_GPU = (ON_GPU, "processes_per_node=1", "model=mlp")


@pytest.mark.parametrize("entry", [STAGED_ENTRY, REPLICATED_ENTRY], ids=lambda entry: entry.name)
def test_a_process_per_host_equals_forked_ranks(entry: Entry, exact: Settings, tmp_path: Path) -> None:
    """Two launched processes, each the only rank of its host, as torchrun starts them on two machines."""
    forked = train_on_gpu(entry.name, *exact, *entry.make_rank_settings(2), runs=tmp_path / "forked")
    settings = list(entry.make_rank_settings(2))
    if "processes_per_node=2" in settings:
        settings.remove("processes_per_node=2")
    runs = tmp_path / "launched"
    argv = make_run_command(entry.name, *exact, *settings, ON_GPU, runs=runs)
    port = find_free_port()
    commands = [start_rank(argv, rank, port) for rank in range(2)]
    try:
        for command in commands:
            command.wait(WAIT_TIMEOUT)
    finally:
        for command in commands:
            kill_session(command.pid)
    for command in commands:
        assert command.returncode == 0, command.stderr
    launched = FinishedRun(0, commands[0].stdout, commands[0].stderr, runs)
    check_world(launched.folder)
    check_logs(launched.folder)
    assert compare_losses(launched, forked) < FLOAT64_TOLERANCE


def start_rank(argv: list[str], rank: int, port: int) -> Command:
    """Start one of two ranks, which is the only one of its host."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables["NCCL_HOSTID"] = f"rank-{rank}"
    environment = make_gpu_environment(**variables)
    return Command(argv, env=environment, new_session=True)


def test_torchrun_starts_a_rank_on_the_gpu(small: Settings, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={find_free_port()}"]
    script = make_run_command("ddp_multinode", *small, "model=mlp", ON_GPU, runs=tmp_path)[1:]
    argv = [*launcher, *script]
    environment = make_gpu_environment()
    execution.execute_command(argv, env=environment, timeout=WAIT_TIMEOUT, real_process=True, status=0)
    check_world(get_only_run(tmp_path))


def test_a_finished_run_is_evaluated_exported_and_repeated(small: Settings, tmp_path: Path) -> None:
    run = train_without_sharing("ddp_multinode", *small, *ONE_GPU, runs=tmp_path / "runs")
    check_logs(run.folder)
    path = str(run.folder.path)
    execute_verb_on_gpu("evaluate", "--", path)
    execute_verb_on_gpu("export", "--format=torch.export", "--", path)
    execute_verb_on_gpu("rerun", "--", path)
    execute_verb_on_gpu("doctor", f"--run={path}")


def execute_verb_on_gpu(*arguments: str) -> str:
    """Execute `python -m slurm` with visible GPUs, check that it succeeds, and return its output."""
    return execute_verb(*arguments, env=make_gpu_environment(), timeout=WAIT_TIMEOUT, status=0).stdout


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_doctor_checks_this_machine(nodes: int, tmp_path: Path) -> None:
    """With two ranks and one GPU, the ranks use CPUs."""
    paths = f"runs={tmp_path} data.cache={tmp_path / 'cache'}"
    output = execute_verb_on_gpu("doctor", f"--nodes={nodes}", "--launch=local", f"--args={paths}")
    assert "all checks passed" in output


def test_too_few_gpus_are_reported(small: Settings, tmp_path: Path) -> None:
    if DEVICE == "cpu":
        pytest.skip("a run on CPUs needs no GPUs")
    settings = (*small, "launch.device=cuda", "processes_per_node=16", "batch=32")
    run = train_without_sharing("ddp_multinode", *settings, runs=tmp_path, status=EXIT_REFUSED)
    assert "for 16 ranks; use fewer ranks or launch.device=auto" in run.stderr


@contextlib.contextmanager
def start_endless_run(entry: Entry, small: Settings, runs: Path, *settings: str) -> Iterator[Command]:
    """Start two ranks on a GPU that train without end, and wait for the first row of metrics. Kill them at the end."""
    settings = (*small, *entry.make_rank_settings(2), *ENDLESS_SETTINGS, *settings)
    argv = make_gpu_command(entry.name, *settings, runs=runs)
    environment = make_gpu_environment()
    command = Command(argv, env=environment, new_session=True)
    try:
        wait_until(lambda: has_metrics(runs) or command.poll() is not None, "the run trains")
        assert command.poll() is None, command.stdout + command.stderr
        yield command
    finally:
        kill_session(command.pid)
        command.wait(WAIT_TIMEOUT)


@pytest.mark.parametrize("entry", [STAGED_ENTRY, REPLICATED_ENTRY], ids=lambda entry: entry.name)
def test_a_stop_request_saves_the_last_step(entry: Entry, small: Settings, tmp_path: Path) -> None:
    with start_endless_run(entry, small, tmp_path) as command:
        command.send_signal(signal.SIGUSR2)
        out, err = command.communicate(WAIT_TIMEOUT)
    assert command.returncode == EXIT_RESUMABLE, out + err
    folder = get_only_run(tmp_path)
    (checkpoint,) = storage.list_resumable_checkpoints(folder)
    steps = [row["global_step"] for row in folder.read_metrics()]
    assert checkpoint.step == max(steps), "a step was lost"
    output = resume_on_gpu(entry, folder, f"steps={checkpoint.step + 4}")
    assert f"resumed from step {checkpoint.step}" in output


@pytest.mark.parametrize("entry", [STAGED_ENTRY, REPLICATED_ENTRY], ids=lambda entry: entry.name)
def test_a_hanging_rank_is_named(entry: Entry, small: Settings, tmp_path: Path) -> None:
    with start_endless_run(entry, small, tmp_path, "launch.step_timeout=10") as command:
        os.kill(list_rank_pids(command)[1], signal.SIGSTOP)
        out, err = command.communicate(WAIT_TIMEOUT)
    assert command.returncode != 0, out
    assert "rank 1 on" in err, err
    assert "did not answer within 10 s" in err, err
