"""Command lines that are refused before a folder is made and a rank is started."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from common.ranks.rank_info import RankInfo
from common.system.errors import UserError
from common.training.entry_point import run_from_command_line
from common.training.host_resources import print_notice_of_shared_cores
from configs.ddp_multinode import Config
from configs.shared import Launch


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("optim.name=no.py:Own", "no.py; name an existing FILE.py:Class, or use one of sgd, adam, adamw, lars, lamb"),
        ("optim.decay={}/own.py:f", "own.py:1: the function returned -1 for step 0 of 100"),
    ],
)
def test_files_of_ones_own_are_read_before_anything_starts(
    setting: str, told: str, tmp_path: Path, digits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("def f(step, total): return -1")
    words = (*digits, "wandb.mode=disabled", f"runs={tmp_path / 'runs'}", setting.format(tmp_path))
    monkeypatch.setattr("sys.argv", ["ddp_multinode.py", *words])
    with pytest.raises(UserError) as caught:
        run_from_command_line(lambda cfg, run: None, Config, None)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


def test_a_copied_script_with_the_config_of_another_experiment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["experiments/my_ddp.py", f"runs={tmp_path / 'runs'}"])
    with pytest.raises(UserError, match="make new-experiment NAME=my_ddp") as caught:
        run_from_command_line(lambda cfg, run: None, Config, None)
    assert "would execute ddp_multinode.py" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_limit_on_open_files_that_is_too_low_is_refused_before_anything_starts(
    tmp_path: Path, digits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ddp_multinode.py", *digits, "wandb.mode=disabled", f"runs={tmp_path / 'runs'}"])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (63, limits[1]))
    try:
        with pytest.raises(UserError, match=r"^ulimit -n is 63, but a run opens more .*; use ulimit -n 1024$"):
            run_from_command_line(lambda cfg, run: None, Config, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", range(4))
def test_rank_0_says_at_once_why_all_refuse(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr("sys.argv", ["ddp_multinode.py", "no_such_key=1"])
    info = RankInfo(rank, 4, rank % 2, 2, 2, launcher="torchrun")
    with pytest.raises(UserError, match="unknown key no_such_key"):
        run_from_command_line(lambda cfg, run: None, Config, info)
    assert bool(waited) == (rank > 0), "the launcher ends the others meanwhile"


@pytest.mark.parametrize(("ranks", "job_cores", "told"), [(64, 0, True), (2, 0, False), (64, 64, False)])
def test_more_ranks_than_cores_get_a_notice(
    ranks: int, job_cores: int, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", str(job_cores))
    cfg = Config(launch=Launch(device="cpu"))
    print_notice_of_shared_cores(cfg, ranks)
    notice = "64 ranks share 2 cores of this host; steps will be slow\n"
    assert capsys.readouterr().out == (notice if told else "")
