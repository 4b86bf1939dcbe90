"""Declarations of local_sgd for the shared tests."""

from __future__ import annotations

from configs.local_sgd import Config
from tests.harness.experiments.entry import SCORE_KEYS, Entry
from tests.harness.settings_text import split_cases, split_settings

RESUME_VARIANTS = """
    model=mlp every=4 start=2 outer=nesterov outer_lr=0.7 optim.name=adamw optim.lr=0.001
    model=mlp every=5 delay=3 communication=powersgd optim.lr=0.05 momentum_of=reset
    model=mlp every=4 communication=int8 momentum_of=averaged
    model=mlp every=3 delay=2 communication=topk topk=0.1
"""
CLUSTER_SETTINGS = """
    data.name=imagefolder data.image_size=8 data.block=1 every=3 delay=1 communication=bf16
    batch=16 optim.base_batch=16 epochs=6
"""
"""An exchange starts every three steps, so most checkpoints are saved within a round."""

ENTRY = Entry(
    name="local_sgd",
    own_technique="local_sgd",
    smallest_settings=(*Config.smallest_settings, "model=mlp"),
    processes=2,
    result_keys=(*SCORE_KEYS, "exchanges", "bytes_sent", "exchange_seconds"),
    # With these settings, a run equals one on one rank.
    make_rank_settings=lambda count: (f"processes_per_node={count}", "every=1", "momentum_of=averaged", "model=mlp"),
    resume_variants=split_cases(RESUME_VARIANTS),
    fixes_rank_count=True,
    page_settings=("batch=16", "every=5", "start=1"),
    allowed_techniques=frozenset({"local_sgd", "data_parallel"}),
    cluster_settings=split_settings(CLUSTER_SETTINGS),
)
