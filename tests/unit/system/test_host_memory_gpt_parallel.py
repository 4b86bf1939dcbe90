"""The memory that a GPT needs."""

from __future__ import annotations

import pytest

from common.config import config
from common.system import host_memory
from configs.gpt_parallel import Config
from tests.harness.parity.gpt_parallel_cases import build_gpt


@pytest.mark.parametrize("settings", ["", "activation=gelu tied=false", "key_value_heads=2 hidden=96"])
def test_the_estimate_is_the_number_of_parameters(settings: str) -> None:
    cfg = config.load_config(Config, settings.split(), {})
    network = build_gpt(cfg)
    assert cfg.estimated_parameters == sum(parameter.numel() for parameter in network.parameters())


TENSORS_PER_HOST = {
    "replicas=4": 4 * 4,
    "replicas=2 tensor=2": 2 * 4,
    "context=4": 4 * 4,
    "fsdp=2 context=2": 4,
    "stages=2 replicas=2 zero1=true": 2 * 2 + 2,
}


@pytest.mark.parametrize("settings, tensors", TENSORS_PER_HOST.items())
def test_the_estimate_counts_divided_tensors_once(settings: str, tensors: int) -> None:
    cfg = config.load_config(Config, settings.split(), {})
    parameter_bytes = 4 * cfg.estimated_parameters
    assert host_memory.estimate_memory_bytes(cfg) == pytest.approx(tensors * parameter_bytes)
