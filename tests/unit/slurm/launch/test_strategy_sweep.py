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
from slurm.launch.sweep_folder import SweepFolder

NAME = "ddp_multinode"


def plan(*overrides: str, name: str = NAME, ranks: str = "4", rounds: str = "") -> SweepPlan:
    return plan_strategies(StrategyRequest(name, ranks, rounds), overrides)


def test_the_first_point_is_one_process_and_all_points_have_the_same_settings() -> None:
    sweep = plan("batch=32")
    labels = [point.label for point in sweep.points]
    assert labels[:3] == ["one process", "one process recompute=blocks", "processes_per_node=4 strategy=ddp"]
    for point in sweep.points:
        cfg = point.settings
        assert cfg.processes == (1 if point.label.startswith("one process") else 4)
        assert cfg.log.memory == 12
        assert getattr(cfg, "batch", 0) == 32
        assert cfg.wandb.group == sweep.name


def test_rounds_are_interleaved_and_have_different_seeds() -> None:
    sweep = plan(rounds="2")
    labels = [point.label for point in sweep.points]
    half = len(labels) // 2
    assert labels[:half] == labels[half:]
    assert sweep.points[0].settings.seed == 0
    assert sweep.points[half].settings.seed == 1


def test_a_refused_strategy_is_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = plan("static_graph=true")
    labels = [point.label for point in sweep.points]
    assert "processes_per_node=4 strategy=fsdp" not in labels
    print_refused(sweep.refused)
    assert capsys.readouterr().out == (
        "  not available: processes_per_node=4 strategy=fsdp and 2 more: static_graph applies to DDP only; use "
        "strategy=ddp or omit static_graph\n"
    )


def test_a_batch_that_the_ranks_cannot_divide_leaves_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = plan("batch=63", ranks="2")
    assert [point.label for point in sweep.points] == ["one process", "one process recompute=blocks"]
    print_refused(sweep.refused)
    out = capsys.readouterr().out
    assert "processes_per_node=2 strategy=ddp and 8 more: batch=63 cannot be divided evenly" in out


def test_sweeps_with_different_settings_have_different_names() -> None:
    settings: list[dict[str, str]] = [{}, {"batch": "32"}, {"batch": "16"}, {"runs": "elsewhere"}]
    names = [make_sweep_name(NAME, 4, given) for given in settings]
    assert names[0] == names[3] == "strategies-ddp_multinode-4"
    assert len(set(names)) == 3


@pytest.mark.parametrize("gpus, device", [(0, None), (2, "cpu"), (4, "cuda")])
def test_all_strategies_use_the_same_type_of_device(
    gpus: int, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "count_visible_gpus", lambda: gpus)
    assert choose_device(Launch(), 4).get("launch.device") == device
    assert choose_device(Launch(device="cpu"), 4) == {}
    assert choose_device(Launch(backend="builtin"), 4) == {}


@pytest.mark.parametrize("runs_here", [True, False])
def test_jobs_of_a_cluster_choose_their_device(runs_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "count_visible_gpus", lambda: 2)
    sweep = plan_strategies(StrategyRequest("resnet_modelparallel", "2", ""), ["model=toy"], runs_here=runs_here)
    assert ("launch.device" in sweep.settings) == runs_here


def test_a_sweep_is_not_continued_on_another_type_of_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = StrategyRequest("resnet_modelparallel", "2", "")
    plans = []
    for gpus in (0, 1, 2):
        monkeypatch.setattr(provenance, "count_visible_gpus", lambda count=gpus: count)
        plans.append(plan_strategies(request, ["model=toy"]))
    without_gpus, with_one_gpu, with_two_gpus = plans
    SweepFolder(tmp_path, with_one_gpu).save()
    remedy = "; repeat the command there, or set ARGS=seed=1 to start a new sweep here"
    with pytest.raises(UserError, match=rf"on another machine, with launch\.device=cpu{remedy}"):
        SweepFolder(tmp_path, with_two_gpus)
    with pytest.raises(UserError, match=rf"on another machine, with launch\.device=cpu{remedy}"):
        SweepFolder(tmp_path, without_gpus)
    SweepFolder(tmp_path, with_one_gpu)


INVALID_REQUESTS = {
    ". 4": "needs the experiment and the number of ranks, such as make sweep GRID=",
    "ddp_multinode .": "needs the experiment and the number of ranks",
    "ddp_multinod 4": "did you mean ddp_multinode?",
    "mnist_pipeline 4": "this experiment has no strategies to compare; use ddp_multinode",
    "ddp_multinode 0": "RANKS must be an integer from 1",
    "ddp_multinode 4 x": "ROUNDS must be an integer from 1",
    "ddp_multinode 4 1 zero1=true": "omit zero1, or start one run: make exp NAME=ddp_multinode ARGS=zero1=true",
    "ddp_multinode 4 1 steps=1": "steps=1: the first step of a run is not timed; use steps=2 or more",
    "ddp_multinode 4 1 batch=0": "batch=0: out of range",
    "ddp_multinode 4 1 model=mlp": "The sweep sets sync_batchnorm=true; set another value in ARGS",
}
"""Experiment, ranks, rounds and settings. A dot stands for an argument that is not given."""


@pytest.mark.parametrize("text, message", INVALID_REQUESTS.items())
def test_an_invalid_request_is_refused_with_the_remedy(text: str, message: str) -> None:
    words = [word.strip(".") for word in text.split()]
    rounds = "".join(words[2:3])
    with pytest.raises(UserError) as refused:
        plan(*words[3:], name=words[0], ranks=words[1], rounds=rounds)
    assert message in str(refused.value)


def test_a_setting_of_the_user_is_not_ascribed_to_the_sweep() -> None:
    with pytest.raises(UserError) as refused:
        plan("eval_batch=32.5")  # contains batch=32, which the sweep sets
    assert "The sweep sets" not in str(refused.value)


def test_the_grid_is_recognized_in_this_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.ROOT)
    assert strategy_sweep.is_strategy_grid("configs/sweeps/strategies.py")
    monkeypatch.chdir(tmp_path)
    assert not strategy_sweep.is_strategy_grid("configs/sweeps/strategies.py")
