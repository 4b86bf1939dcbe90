"""Sweep over strategies: the points, the strategies that are refused, and invalid requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import config
from common.runs import provenance
from common.system.errors import UserError
from configs.shared import Launch
from slurm.launch import strategy_sweep
from slurm.launch.strategy_sweep import (
    StrategyRequest,
    choose_device,
    make_sweep_name,
    plan_strategies,
    print_refused,
)
from slurm.launch.sweep_file import SweepPlan

NAME = "ddp_multinode"


def plan(*overrides: str, name: str = NAME, ranks: str = "4", rounds: str = "") -> SweepPlan:
    return plan_strategies(StrategyRequest(name, ranks, rounds), overrides)


def test_the_first_point_is_one_process_and_all_points_have_the_same_settings() -> None:
    sweep = plan("batch=32")
    assert [point.label for point in sweep.points[:3]] == [
        "one process",
        "processes_per_node=4 strategy=ddp",
        "processes_per_node=4 strategy=fsdp",
    ]
    assert [point.settings.processes for point in sweep.points] == [1] + [4] * (len(sweep.points) - 1)
    assert all(point.settings.log.memory == 12 for point in sweep.points)
    assert {getattr(point.settings, "batch", 0) for point in sweep.points} == {32}
    assert sweep.points[0].settings.wandb.group == sweep.name


def test_rounds_are_interleaved_and_have_different_seeds() -> None:
    sweep = plan(rounds="2")
    half = len(sweep.points) // 2
    assert [point.label for point in sweep.points[:half]] == [point.label for point in sweep.points[half:]]
    assert [point.settings.seed for point in (sweep.points[0], sweep.points[half])] == [0, 1]


def test_a_refused_strategy_is_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = plan("static_graph=true")
    labels = [point.label for point in sweep.points]
    assert "processes_per_node=4 strategy=fsdp" not in labels
    print_refused(sweep)
    assert capsys.readouterr().out == (
        "  not available: processes_per_node=4 strategy=fsdp: static_graph applies to DDP only; use strategy=ddp or "
        "omit static_graph\n"
    )


def test_a_batch_that_the_ranks_cannot_divide_leaves_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = plan("batch=63", ranks="2")
    assert [point.label for point in sweep.points] == ["one process"]
    print_refused(sweep)
    out = capsys.readouterr().out
    assert "processes_per_node=2 strategy=ddp and 4 more: batch=63 cannot be divided evenly" in out


def test_sweeps_with_different_settings_have_different_names() -> None:
    settings: list[dict[str, str]] = [{}, {"batch": "32"}, {"batch": "16"}, {"runs": "elsewhere"}]
    names = [make_sweep_name(NAME, 4, given) for given in settings]
    assert names[0] == names[3] == "strategies-ddp_multinode-4"
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    "gpus, launch, settings",
    [
        (0, Launch(), {}),
        (2, Launch(), {"launch.device": "cpu"}),
        (4, Launch(), {"launch.device": "cuda"}),
        (4, Launch(device="cpu"), {}),
        (4, Launch(backend="builtin"), {}),
    ],
)
def test_all_strategies_use_the_same_type_of_device(
    gpus: int, launch: Launch, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "count_visible_gpus", lambda: gpus)
    assert choose_device(launch, 4) == settings


INVALID_REQUESTS = {
    ("", "4", "", ""): "needs the experiment and the number of ranks, such as make sweep GRID=",
    (NAME, "", "", ""): "needs the experiment and the number of ranks",
    ("ddp_multinod", "4", "", ""): "did you mean ddp_multinode?",
    ("mnist_pipeline", "4", "", ""): "this experiment has no strategies to compare; use ddp_multinode",
    (NAME, "0", "", ""): "RANKS must be an integer from 1",
    (NAME, "4", "x", ""): "ROUNDS must be an integer from 1",
    (NAME, "4", "", "strategy=fsdp"): "ARGS sets strategy, but the sweep compares all values; omit strategy",
    (NAME, "4", "", "batch=0"): "batch=0: out of range",
}


@pytest.mark.parametrize("request_texts, message", INVALID_REQUESTS.items())
def test_an_invalid_request_is_refused_with_the_remedy(request_texts: tuple[str, ...], message: str) -> None:
    name, ranks, rounds, override = request_texts
    with pytest.raises(UserError) as refused:
        plan(*override.split(), name=name, ranks=ranks, rounds=rounds)
    assert message in str(refused.value)


def test_the_grid_is_recognized_in_this_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.ROOT)
    assert strategy_sweep.is_strategy_grid("configs/sweeps/strategies.py")
    monkeypatch.chdir(tmp_path)
    assert not strategy_sweep.is_strategy_grid("configs/sweeps/strategies.py")
