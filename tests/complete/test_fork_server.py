"""A fork of the fork server equals a real process: exit status, output and run folder are the same."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.runs import provenance
from tests.harness.commands import execution
from tests.harness.commands.exit_status import check_status
from tests.harness.commands.fork_comparison import execute_forked_and_real, mask_folder_names, read_all_files
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    Settings,
    find_processes,
    get_only_run,
    make_environment,
    make_run_command,
    run_experiment,
    wait_until,
)
from tests.harness.repository import ROOT
from tests.harness.runs.long_runs import ENDLESS_SETTINGS, start_long_run


def compare_outputs(argv: Callable[[Path], list[str]], place: Path) -> str:
    """Check that a fork and a real process succeed and print the same; return the output."""
    fork, real = execute_forked_and_real(argv, place)
    for process in (fork, real):
        check_status(process, 0)
        assert process.stderr == ""
    assert fork.stdout.splitlines() == real.stdout.splitlines()
    return fork.stdout


@pytest.mark.drawn
def test_a_finished_run_leaves_the_same_folder_and_output(tmp_path: Path, quick: Settings) -> None:
    """The command is replaced by the script of the experiment."""

    def argv(runs: Path) -> list[str]:
        settings = shlex.join([f"runs={runs}", *quick, "steps=12", "microbatches=2"])
        return [sys.executable, "-m", "slurm", "exp", "--launch=local", f"--args={settings}", "--", "mnist_pipeline"]

    compare_outputs(argv, tmp_path)
    files = read_all_files(tmp_path / "fork")
    expected_files = read_all_files(tmp_path / "real")
    assert files.keys() == expected_files.keys()
    assert len([name for name in files if name.endswith(".pt")]) == 8
    assert [name for name in files if files[name] != expected_files[name]] == []
    assert len(files["attempts/0001/metrics.jsonl"]) == 13
    assert files["result.json"]["scores"]["test_samples"] == 100


@pytest.mark.drawn
def test_a_command_that_starts_others_prints_the_same(tmp_path: Path, quick: Settings) -> None:
    """`rerun` reads the settings with the source of a run, and then executes this source."""
    old = run_experiment("mnist_pipeline", *quick, "steps=6", runs=tmp_path / "first").folder
    script = old.path / "code" / "experiments" / "mnist_pipeline.py"
    script.write_text(script.read_text().replace("\nif __name__", "\nprint('source of the run')\nif __name__"))
    (old.path / "code" / provenance.CHECKSUMS).unlink()

    def argv(runs: Path) -> list[str]:
        shutil.copytree(tmp_path / "first", runs)
        return [sys.executable, "-m", "slurm", "rerun", "--launch=local", "--", str(runs / old.path.name)]

    output = compare_outputs(argv, tmp_path)
    assert "\nsource of the run\n" in output
    assert "losses      bitwise equal in 6 steps" in output
    forked_runs = {path.name for path in (tmp_path / "fork").glob("mnist_pipeline-*")}
    real_runs = {path.name for path in (tmp_path / "real").glob("mnist_pipeline-*")}
    assert len(forked_runs) == 2
    assert len(real_runs) == 2
    assert forked_runs & real_runs == {old.path.name}


def interrupt_training(runs: Path, quick: Settings, *, real: bool) -> tuple[int | None, str, list[str]]:
    """Interrupt a run. Returns exit status, output and files, without what depends on the time of the interruption."""
    with start_long_run("mnist_pipeline", *quick, *ENDLESS_SETTINGS, runs=runs, real_process=real) as process:
        process.send_signal(signal.SIGINT)
        output = "\n--\n".join(mask_folder_names(text, runs) for text in process.communicate(WAIT_TIMEOUT))
    last_step = get_only_run(runs).result["last_step"]
    files = [re.sub(r"step-\d+", "step-LAST", file) for file in read_all_files(runs)]
    output = re.sub(r"^epoch .*\n", "", output, flags=re.MULTILINE)
    output = re.sub(rf"\bstep {last_step}\b", "step LAST", output)
    return process.returncode, output, sorted(files)


@pytest.mark.drawn
def test_ctrl_c_in_training_ends_both_with_the_same_output(tmp_path: Path, quick: Settings) -> None:
    fork = interrupt_training(tmp_path / "fork", quick, real=False)
    real = interrupt_training(tmp_path / "real", quick, real=True)
    assert fork == real
    status, output, _ = fork
    assert status == 128 + signal.SIGINT
    assert "saved at step LAST" in output


@pytest.mark.drawn
@pytest.mark.parametrize("arguments, status", [(("no_such_key=1",), 2), (("--help",), 0)], ids=["a user error", "help"])
def test_output_without_a_run_is_the_same(arguments: tuple[str, ...], status: int, tmp_path: Path) -> None:
    fork, real = execute_forked_and_real(
        lambda runs: make_run_command("mnist_pipeline", *arguments, runs=runs), tmp_path
    )
    assert fork.returncode == real.returncode == status
    assert (fork.stdout, fork.stderr) == (real.stdout, real.stderr)
    assert ("no_such_key" in fork.stderr) == bool(status)
    assert not list(tmp_path.iterdir())


@pytest.mark.drawn
def test_an_uncaught_exception_prints_the_same_traceback(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.harness.ranks.launch_cases", "no_such_case", str(tmp_path)]
    fork, real = execute_forked_and_real(lambda _: argv, tmp_path)
    assert fork.returncode == 1, fork.stderr
    assert real.returncode == 1, real.stderr
    assert fork.stdout == ""
    assert real.stdout == ""
    assert fork.stderr.startswith("Traceback (most recent call last):\n")
    last = fork.stderr.splitlines()[-4:]
    assert last == real.stderr.splitlines()[-4:]
    assert last[-1] == "KeyError: 'no_such_case'"
    assert last[0].startswith(f'  File "{ROOT}/tests/harness/ranks/launch_cases.py", line ')


@pytest.mark.drawn
def test_no_command_outlives_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's stdin closes when pytest is killed. Only one of the commands leads a session and has a child."""
    program = "from tests.harness.commands import fork_server as server; server.preload = lambda: None; server.main()"
    socket_path = tmp_path / "socket"
    monkeypatch.setattr(execution.ForkServer, "_path", str(socket_path))
    env = make_environment(MARKER=str(tmp_path))
    timeit = [sys.executable, "-m", "timeit", "-n1"]
    argv = [sys.executable, "-c", program, str(socket_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE) as server:
        assert server.stdin
        try:
            execution.Command([*timeit, "import time; time.sleep(1000)"], env=env, new_session=False)
            execution.Command(
                [*timeit, "import subprocess; subprocess.run(['sleep', '1000'])"], env=env, new_session=True
            )
            wait_until(lambda: len(find_processes(str(tmp_path))) == 4, "the server, two commands and a child run", 60)
            server.stdin.close()
            assert server.wait(WAIT_TIMEOUT) == 0
            wait_until(lambda: not find_processes(str(tmp_path)), "no process is left", 5)
        finally:
            for pid in find_processes(str(tmp_path)):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.drawn
def test_a_process_that_opens_and_closes_files_is_found(tmp_path: Path) -> None:
    program = "while True: files = [open('/dev/null') for _ in range(50)]; [file.close() for file in files]"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as process:
        try:
            wait_until(lambda: find_processes(str(tmp_path)) == [process.pid], "the process runs")
            for _ in range(20):
                assert find_processes(str(tmp_path)) == [process.pid]
        finally:
            process.kill()
