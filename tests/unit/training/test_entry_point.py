"""Command lines that are refused before a run folder is created and a rank is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.ranks.rank_info import RankInfo
from common.system.errors import UserError
from common.training.entry_point import run_from_command_line
from configs.ddp_multinode import Config
from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment
from tests.harness.commands.refusals import expect_refusal


def run_script(rank_info: RankInfo | None = None) -> None:
    """Run a script that trains nothing, with the command line in sys.argv."""
    run_from_command_line(lambda cfg, run: None, Config, rank_info)


@pytest.fixture
def command_line(tmp_path: Path, digits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A valid command line, which is set as sys.argv. Tests append other settings."""
    arguments = ["ddp_multinode.py", *digits, "wandb.mode=disabled", f"runs={tmp_path / 'runs'}"]
    monkeypatch.setattr("sys.argv", arguments)
    return arguments


INVALID_CUSTOM_FILES = {
    "optim.name=no.py:Own": "no.py; name an existing FILE.py:Class, or use one of sgd, adam, adamw, lars, lamb",
    "optim.decay={folder}/own.py:f": "own.py:1: the function returned -1 for step 0 of 100",
}


@pytest.mark.parametrize("setting, message", INVALID_CUSTOM_FILES.items())
def test_custom_files_are_checked_before_anything_starts(
    setting: str, message: str, tmp_path: Path, command_line: list[str]
) -> None:
    (tmp_path / "own.py").write_text("def f(step, total): return -1")
    command_line.append(setting.format(folder=tmp_path))
    with expect_refusal(message):
        run_script()
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


def test_a_copied_script_with_the_config_of_another_experiment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["experiments/my_ddp.py", f"runs={tmp_path / 'runs'}"])
    with pytest.raises(UserError, match="make new-experiment NAME=my_ddp") as caught:
        run_script()
    assert "would execute ddp_multinode.py" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_limit_on_open_files_that_is_too_low_is_refused_before_anything_starts(
    tmp_path: Path, digits: tuple[str, ...]
) -> None:
    """The script is a real process, because this one may have more open files than the limit."""
    script = (sys.executable, "experiments/ddp_multinode.py", *digits, f"runs={tmp_path / 'runs'}")
    argv = ["bash", "-c", 'ulimit -n 63; exec "$@"', "bash", *script]
    completed = execution.execute_command(argv, env=make_environment(), real_process=True, status=2)
    message = "ulimit -n is 63, but a run opens more files and connections; use ulimit -n 1024"
    assert completed.stderr == f"error: {message}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", range(4))
def test_rank_0_reports_an_error_of_all_ranks_first(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait, and the launcher ends them meanwhile."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr("sys.argv", ["ddp_multinode.py", "no_such_key=1"])
    rank_info = RankInfo(rank, 4, rank % 2, 2, 2, launcher="torchrun")
    with pytest.raises(UserError, match="unknown key no_such_key"):
        run_script(rank_info)
    assert bool(waits) == (rank > 0)
