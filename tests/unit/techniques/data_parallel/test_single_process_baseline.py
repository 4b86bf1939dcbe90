"""The timed steps outside the training loop do the same work as the steps of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.config.config import load_config
from common.data.prepare import prepare_digits
from common.models import networks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.techniques.data_parallel import single_process_baseline
from common.techniques.data_parallel.single_process_baseline import (
    StepVariant,
    make_step_function,
    measure_variant_throughputs,
    time_single_rank,
)
from common.training.run import Run
from configs.ddp_multinode import Config


def make_run(folder: Path, world: World, cache: Path, *settings: str) -> tuple[Config, Run]:
    """Return a run of ddp_multinode on the digits, which has not registered a model, and its config."""
    cfg = load_config(Config, ["data.name=digits", "batch=4", *settings], {})
    run_folder = RunFolder.create(folder, "ddp_multinode", "").claim_attempt()
    return cfg, Run(cfg, run_folder, Ranks(world), prepare_digits(cache))


def test_a_timed_step_clips_the_gradients(tmp_path: Path, world: World, cache: Path) -> None:
    norms = []
    for clip in ("clip=0", "clip=0.01"):
        _, run = make_run(tmp_path, world, cache, clip)
        network = networks.SimpleNN()
        make_step_function(run, network, network)()
        gradients = [parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None]
        norms.append(torch.cat(gradients).norm().item())
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("recompute, passes", [("none", 1), ("blocks", 2)])
def test_the_single_process_recomputes_the_blocks_of_the_run(
    recompute: str, passes: int, tmp_path: Path, world: World, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recomputed block computes its forward pass again in the backward pass."""
    cfg, run = make_run(tmp_path, world, cache, "model=resnet18", f"recompute={recompute}")
    blocks: list[networks.BasicBlock] = []
    compute = networks.BasicBlock.forward

    def count_forward(block: networks.BasicBlock, x: Tensor) -> Tensor:
        blocks.append(block)
        return compute(block, x)

    def take_step(step: Callable[[], Tensor], *_: object, **__: object) -> float:
        step()
        return 1.0

    monkeypatch.setattr(networks.BasicBlock, "forward", count_forward)
    monkeypatch.setattr(single_process_baseline, "time_steps", take_step)
    assert time_single_rank(cfg, run) == 1.0
    assert len(blocks) == passes * len(set(blocks))
    assert len(set(blocks)) == 8


@pytest.mark.parametrize("has_timed_steps", [True, False])
def test_the_other_ranks_do_not_wait_for_half_of_the_step_timeout(
    has_timed_steps: bool, tmp_path: Path, world: World, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run whose training is complete has timed no step, so rank 0 takes one step alone."""
    two_ranks = dataclasses.replace(world, size=2, timeout=timedelta(seconds=10))
    cfg, run = make_run(tmp_path, two_ranks, cache, "compare=true", "communication=powersgd")
    network = networks.SimpleNN()
    run.register(network, torch.optim.SGD(network.parameters()), run.batches(), replicated=True)
    step_seconds = 1.0
    timed_steps: list[int] = []

    def time_call(*_: object, **__: object) -> list[float]:
        return [2 * step_seconds]

    def count_steps(step: Callable[[], Tensor], device: torch.device, count: int, **_: object) -> float:
        timed_steps.append(count)
        return 2 * step_seconds

    monkeypatch.setattr(Run, "compute_step_seconds", lambda run: step_seconds if has_timed_steps else 0.0)
    monkeypatch.setattr(single_process_baseline, "time_calls", time_call)
    monkeypatch.setattr(single_process_baseline, "time_steps", count_steps)
    monkeypatch.setattr(single_process_baseline, "gather_step_times", lambda *_: [])

    def list_rows() -> dict[str, str]:
        rows: dict[str, str] = {}
        for report in single_process_baseline.report_scaling(cfg, run, network):
            rows |= report.rows()
        return rows

    def make_model() -> tuple[Callable[[Tensor], Tensor], torch.nn.Module]:
        return network, network

    variant = StepVariant("single", 1, make_model, shard=None)
    remedy = "skipped: the other ranks would wait too long for rank 0; raise launch.step_timeout"
    assert list_rows()["comparison"] == remedy
    assert measure_variant_throughputs(run, [variant]) == {}
    assert not timed_steps

    step_seconds = 0.3
    assert "comparison" not in list_rows()
    assert measure_variant_throughputs(run, [variant]) == {"single": [pytest.approx(4 / 0.6)] * 3}
    assert timed_steps == [20, 5, 5, 5]
