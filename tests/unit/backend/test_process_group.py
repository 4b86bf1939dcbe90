"""The process group of the backend `builtin`: results of collectives, failures of ranks, and the private folder."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.harness.ranks.backend_calls import CASES
from tests.harness.ranks.programs import check_program, execute_launch_case


@pytest.mark.parametrize(
    "ranks, transport, cases",
    [(2, "auto", ("copies", "messages", "time_limits", "asynchronous_calls", "subgroups")), (3, "network", CASES)],
    ids=["2-auto", "3-network"],
)
def test_collectives_return_the_computed_values(ranks: int, transport: str, cases: Iterable[str]) -> None:
    check_program("backend_calls", ranks, transport, *cases)


def test_ranks_that_wait_for_a_killed_rank_fail_at_once(tmp_path: Path) -> None:
    process = execute_launch_case("rank_2_is_killed", tmp_path, "builtin")
    assert process.returncode == 128 + signal.SIGKILL, process.stderr
    assert "error: rank 2 (pid" in process.stderr
    assert "Traceback" not in process.stderr


def test_a_collective_fails_after_the_step_timeout_and_names_the_silent_rank(tmp_path: Path) -> None:
    process = execute_launch_case("rank_0_hangs", tmp_path, "builtin")
    assert process.returncode == 1
    assert "TimeoutError: barrier: rank 0 does not answer (no progress for 1 s); see its log" in process.stderr


def test_aborting_a_group_in_another_thread_ends_all_pending_collectives(tmp_path: Path) -> None:
    """The abort on rank 1 also ends those of rank 2. With gloo, rank 2 would wait for the timeout."""
    process = execute_launch_case("rank_1_aborts_the_group", tmp_path, "builtin")
    assert process.stderr == "error: all collectives have ended\n"
    errors = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert errors["1-0"].startswith("DistNetworkError: the process group was destroyed on this rank")
    assert errors["1-1"].startswith("DistNetworkError: all_reduce: the connection with rank 0 was closed by this rank")
    rank_2_error = "DistNetworkError: all_reduce: rank 1 has closed its connection; see its log"
    assert errors["2-0"] == rank_2_error
    assert errors["2-1"] == rank_2_error


def test_ranks_of_a_job_meet_in_a_private_folder_and_encrypt_everything(tmp_path: Path) -> None:
    """The key is deleted once all ranks are connected, and the folder at the end."""
    process = execute_launch_case("join_with_tls", tmp_path, "builtin")
    assert process.returncode == 0, process.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["key_folder"]
    assert (tmp_path / "key_folder").read_text() == "0o700 ['store']"
