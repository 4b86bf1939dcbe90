"""The timed steps outside the training loop do the same work as the steps of the run."""

from __future__ import annotations

from collections.abc import Callable
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
from common.techniques.data_parallel.single_process_baseline import make_step_function, time_single_rank
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
