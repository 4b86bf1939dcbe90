"""Settings of data parallelism: the number of ranks, and combinations that are refused."""

from __future__ import annotations

import pytest

from common.config import config
from configs.ddp_multinode import Config
from tests.harness.commands.refusals import expect_refusal

INVALID_SETTINGS = {
    "batch=63": "batch=63 ... 2 ranks ... batch=62 or 64 ... processes_per_node=1",
    "batch=64 processes_per_node=5": "batch=60 or 65 ... processes_per_node=4",
    "sync_batchnorm=true": "model=convnet has none ... model=resnet18",
    "strategy=fsdp communication=fp16": "communication applies to DDP only ... strategy=ddp",
    "shards=auto find_unused_parameters=true": "shards=auto measures the time until the last gradient ... shards=[1,3]",
    "strategy=fsdp static_graph=true": "static_graph applies to DDP only",
    "powersgd_rank=4": "powersgd_rank=4 needs communication=powersgd",
    "data.name=generated data.samples=50": "batch=64 exceeds the 50 training samples",
    "data.name=cifar10 batch=50002": "exceeds the 50000 training samples",
    "shards=[2,1,1]": "shards=[2,1,1] has length 3, but there are 2 ranks ... such as [3,1]",
    "shards=3": "shards=[3] has length 1, but there are 2 ranks ... such as [3,1]",
    "shards=[3,-1]": "shards=[3,-1] must be equal, auto, or one integer >= 0 per rank",
    "shards=[3,0.5]": "shards=[3,0.5] must be equal, auto, or one integer >= 0 per rank",
    "shards=[]": "shards=[] must be equal, auto, or one integer",
    "shards=auto batch=4 processes_per_node=5": "one sample per rank ... set batch to at least 5",
    "elastic=true strategy=fsdp": "losing a rank would lose part of the state ... omit strategy=fsdp",
    "elastic=true zero1=true": "losing a rank would lose part of the state; omit zero1=true",
    "zero1=true processes_per_node=1": "ranks with the same parameters ... use processes_per_node=2 or more, or omit",
    "zero1=true strategy=fsdp": "zero1 applies to DDP only; use strategy=ddp or omit zero1",
    "fsdp=2": "fsdp=2 needs strategy=fsdp; set strategy=fsdp or use fsdp=0",
    "reshard=false": "reshard=false needs strategy=fsdp; set strategy=fsdp or use reshard=true",
    "strategy=fsdp fsdp=1": "fsdp=1 divides no parameters; use fsdp=2 or more ... or strategy=ddp",
    "strategy=fsdp fsdp=2 processes_per_node=1": "but the run has one; use processes_per_node=2, or fsdp=0",
    "strategy=fsdp fsdp=4 batch=48 processes_per_node=6": "6 ranks cannot be divided evenly by fsdp=4; use fsdp=2 or 3",
    "elastic=true processes_per_node=1": "requires at least two ranks ... processes_per_node=2",
    "shards=auto strategy=fsdp": "shards=auto ... strategy=fsdp ... such as shards=[3,1]",
    "shards=auto model=resnet18 sync_batchnorm=true": "shards=auto ... omit sync_batchnorm=true",
    "launch.mixed=true strategy=fsdp": "launch.mixed=true ... use strategy=ddp",
    "launch.mixed=true launch.device=cpu": "launch.mixed=true ... omit launch.device=cpu",
    "launch.mixed=true launch.backend=builtin": "launch.mixed=true ... omit launch.backend=builtin",
    "shards=[0,0]": "shards=[0,0] assigns no samples to any rank ... at least one weight",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_of_data_parallelism_are_refused(settings: str, message: str) -> None:
    with expect_refusal(message):
        config.load_config(Config, settings.split(), {})


@pytest.mark.parametrize(
    "settings, ranks", [([], 2), (["launch.nodes=4"], 4), (["launch.nodes=2", "processes_per_node=8"], 16)]
)
def test_the_number_of_ranks_follows_from_the_nodes(settings: list[str], ranks: int) -> None:
    assert config.load_config(Config, settings, {}).processes == ranks
