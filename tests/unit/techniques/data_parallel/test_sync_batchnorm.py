"""Synchronized batch normalisation on the CPU, which torch does not support."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.models import networks
from common.system.errors import UserError
from common.techniques.data_parallel import shards, sync_batchnorm
from configs.dataparallel import Sharding
from tests.harness.pitfalls.outcomes import collect_outcome, collect_outcomes


def test_torch_sync_batchnorm_refuses_the_cpu() -> None:
    for outcome in collect_outcome("ddp_pitfalls", "call_torch_sync_batchnorm"):
        assert "GPU" in outcome["error"]


def test_all_norms_are_replaced_and_keep_their_state() -> None:
    original = networks.ResNet("resnet18", (3, 32, 32), 10, width=8)
    copy = networks.ResNet("resnet18", (3, 32, 32), 10, width=8)
    converted = sync_batchnorm.convert_sync_batchnorm(copy, torch.device("cpu"))
    assert converted.state_dict().keys() == original.state_dict().keys()
    norms = [module for module in converted.modules() if isinstance(module, sync_batchnorm.SyncBatchNormNd)]
    assert len(norms) == 20


def test_synchronised_norms_equal_one_process_and_refuse_a_single_value() -> None:
    outcomes = collect_outcomes("ddp_pitfalls", "compare_sync_batchnorm", "normalize_one_sample")
    for differences in outcomes["compare_sync_batchnorm"]:
        assert len(differences) == 4
        assert max(differences) < 5e-3  # rounding of a mean of 1,000
    for outcome in outcomes["normalize_one_sample"]:
        assert "more than one value per channel" in outcome["error"]


class CustomNorm(nn.BatchNorm1d):
    """A norm whose forward pass may differ from that of its base class."""


@pytest.mark.parametrize("layer", [CustomNorm(3), nn.BatchNorm2d(3, affine=False)])
def test_norms_that_cannot_be_synchronised_are_refused(layer: nn.Module) -> None:
    with pytest.raises(UserError, match=rf"{type(layer).__name__}\(3.*sync_batchnorm=false"):
        sync_batchnorm.convert_sync_batchnorm(nn.Sequential(layer), torch.device("cpu"))


def test_a_subclass_is_also_refused_on_gpus_where_torch_would_replace_its_forward_pass() -> None:
    with pytest.raises(UserError, match=r"cannot convert the layer CustomNorm\(3"):
        sync_batchnorm.convert_sync_batchnorm(nn.Sequential(CustomNorm(3)), torch.device("cuda"))


def test_an_empty_shard_of_one_dimensional_norms_is_reported_and_accepted() -> None:
    messages: list[str] = []
    plan = SimpleNamespace(batch=4, microbatches=1, weights=(1, 0))
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(sync_batchnorm=False),
        training_cfg=SimpleNamespace(batch_plan=plan),
        world=SimpleNamespace(rank=1, size=2),
        log_message=messages.append,
    )
    norms = [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)]
    shards.set_up_shards(Sharding(["1", "0"]), run, nn.Sequential(*norms))
    assert "BatchNorm normalizes over each rank's shard" in messages[0]
    assert norms[0](torch.ones(0, 3)).shape == (0, 3)
    assert norms[1](torch.ones(0, 3)).shape == (0, 3)
    assert norms[0].num_batches_tracked == 1
    assert torch.equal(norms[0].get_buffer("running_mean"), torch.zeros(3))
