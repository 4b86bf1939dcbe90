"""Synchronized batch normalisation on the CPU, which torch does not support."""

from __future__ import annotations

import torch

from common.models import networks
from common.techniques.data_parallel import sync_batchnorm
from tests.harness.pitfalls.outcomes import collect_outcome


def test_torch_sync_batchnorm_refuses_the_cpu() -> None:
    for outcome in collect_outcome("ddp_pitfalls", "call_torch_sync_batchnorm"):
        assert "GPU" in outcome["error"]


def test_all_norms_are_replaced_and_keep_their_state() -> None:
    original = networks.ResNet("resnet18", (3, 32, 32), 10, width=8)
    copy = networks.ResNet("resnet18", (3, 32, 32), 10, width=8)
    converted = sync_batchnorm.convert_sync_batchnorm(copy, torch.device("cpu"))
    assert converted.state_dict().keys() == original.state_dict().keys()
    norms = [module for module in converted.modules() if isinstance(module, sync_batchnorm.SyncBatchNorm2d)]
    assert len(norms) == 20
