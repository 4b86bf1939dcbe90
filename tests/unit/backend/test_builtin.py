"""The backend `builtin` of torch.distributed: every call equals arithmetic, and every end is clear."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import warm
from tests.harness.backend_calls import CASES
from tests.harness.processes import PATIENCE, environment, processes_of, run

MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def fork_ranks(case: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Have three ranks do a case of tests/harness/ranks.py; none of them outlives it."""
    argv = [sys.executable, "-m", "tests.harness.ranks", case, str(folder), "builtin"]
    done = warm.execute(argv, env=environment(), timeout=PATIENCE)
    assert not processes_of(str(folder))
    return done


@pytest.mark.parametrize(
    ("ranks", "transport", "cases"),
    [(2, "auto", ("copies", "messages", "time_limits", "later", "groups")), (3, "network", CASES)],
    ids=["2-auto", "3-network"],
)
def test_every_collective_gives_what_arithmetic_gives(ranks: int, transport: str, cases: Iterable[str]) -> None:
    argv = [sys.executable, "-m", "tests.harness.backend_calls", str(ranks), transport, *cases]
    done = warm.execute(argv, env=environment())
    assert done.returncode == 0, done.stderr


def test_ranks_that_wait_for_one_that_was_killed_fail_at_once(tmp_path: Path) -> None:
    done = fork_ranks("one_is_killed", tmp_path)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "error: rank 2 (pid" in done.stderr and "Traceback" not in done.stderr


def test_a_collective_ends_after_the_step_timeout_and_names_whom_it_waited_for(tmp_path: Path) -> None:
    done = fork_ranks("one_hangs", tmp_path)
    assert done.returncode == 1
    assert "TimeoutError: barrier: rank 0 does not answer (no progress for 1 s); see its log" in done.stderr


def test_a_group_that_is_aborted_by_another_thread_ends_all_that_waits(tmp_path: Path) -> None:
    """On rank 1, and so on rank 2; gloo waits for its time-out."""
    done = fork_ranks("one_aborts", tmp_path)
    assert done.stderr == "error: all was ended\n"
    said = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert said["1-0"].startswith("DistNetworkError: the process group was destroyed on this rank")
    assert said["1-1"].startswith("DistNetworkError: all_reduce: the connection with rank 0 was closed by this rank")
    assert said["2-0"] == said["2-1"] == "DistNetworkError: all_reduce: rank 1 has closed its connection; see its log"


def test_ranks_of_a_job_meet_in_a_private_folder_and_encrypt_everything(tmp_path: Path) -> None:
    """The key is gone once all are connected, and the folder at the end."""
    done = fork_ranks("meet_in_private", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["seen"]
    assert (tmp_path / "seen").read_text() == "0o700 ['store']"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PATH": "/nowhere"}, "launch.tls=true requires the openssl program, which "),
        (
            {"RANK": "0", "WORLD_SIZE": "2"} | MASTER,
            "launch.tls=true cannot be used with torchrun, because its rendezvous store",
        ),
    ],
    ids=["openssl", "torchrun"],
)
def test_encryption_that_cannot_be_is_refused(
    environ: dict[str, Any], told: str, tmp_path: Path, digits: tuple[str, ...]
) -> None:
    words = ("launch.backend=builtin", "launch.tls=true")
    done = run("ddp_multinode", *digits, *words, runs=tmp_path / "runs", **environ)
    assert done.status == 2 and done.err.startswith(f"error: {told}") and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("launch.backend=builtin", "launch.device=cuda"), "launch.backend=builtin runs on CPUs only; omit"),
        (("launch.algorithm=tree",), "launch.algorithm=tree requires launch.backend=builtin; add this setting"),
        (("launch.tls=true",), "launch.tls=true requires launch.backend=builtin; add this setting"),
        (
            ("launch.backend=builtin", "launch.algorithm=oak"),
            "=oak: expected FILE.py:function or one of ring, ",
        ),
        (("launch.backend=builtin", "launch.algorithm={own}:wait"), "own.py:1: deadlock: rank 0, move 0"),
        (("launch.backend=builtin", "launch.algorithm={own}:forget"), "ends without the values of rank"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    words: tuple[str, ...], told: str, tmp_path: Path, digits: tuple[str, ...]
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def wait(ranks):\n    return [[('add', 0, 1), ('send', 0, 1)], [('add', 0, 0), ('send', 0, 0)]]\n"
        "def forget(ranks):\n    return [[('send', 0, 1)], [('receive', 0, 0)]]\n"
    )
    given = [word.format(own=own) for word in words]
    done = run("ddp_multinode", *digits, *given, runs=tmp_path / "runs")
    assert done.status == 2 and told in done.err and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "runs").exists()
