"""Declarations of ddp_multinode for the shared tests."""

from __future__ import annotations

from configs.ddp_multinode import Config
from tests.harness.experiments.entry import FEW_STEPS_SETTINGS, MLP_SETTINGS, SCORE_KEYS, Entry
from tests.harness.settings_text import split_cases, split_settings

RESUME_VARIANTS = """
    strategy=fsdp optim.name=adam clip=1 shards=[3,1] dropout=0.3
    strategy=fsdp fsdp=2 reshard=false processes_per_node=4 optim.name=adam model=mlp
    zero1=true optim.name=adam optim.decayed=matrices optim.weight_decay=0.1 model=mlp
    communication=powersgd optim.lr=0.01 model=mlp
"""
"""Settings of a variant in each line. PowerSGD compresses from the tenth step."""
DEEP_VARIANT = split_settings("model=resnet18 sync_batchnorm=true communication=bf16 shards=[0,1]")
EVALUATED = split_settings("strategy=fsdp model=mlp batch=18 processes_per_node=3 dtype=float64")
CLUSTER_SETTINGS = """
    data.name=imagefolder data.image_size=8 data.block=1 data.workers=2
    batch=16 optim.base_batch=16 epochs=6
"""

ENTRY = Entry(
    name="ddp_multinode",
    smallest_settings=(*Config.smallest_settings, *MLP_SETTINGS),
    processes=2,
    result_keys=(*SCORE_KEYS, "ranks", "communication_exposed"),
    make_rank_settings=lambda count: (f"processes_per_node={count}", *MLP_SETTINGS),
    resume_variants=(*split_cases(RESUME_VARIANTS), (*DEEP_VARIANT, *FEW_STEPS_SETTINGS)),
    page_settings=("batch=16",),
    allowed_techniques=frozenset({"data_parallel"}),
    evaluation_variants=(EVALUATED,),
    elastic_campaign_settings=(),
    cluster_settings=split_settings(CLUSTER_SETTINGS),
    parity_transports=("tls", "two_level"),
)
