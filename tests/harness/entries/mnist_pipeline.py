"""Declarations of mnist_pipeline for the shared tests."""

from __future__ import annotations

from configs.mnist_pipeline import Config
from tests.harness.experiments.entry import SCORE_KEYS, Entry

ENTRY = Entry(
    name="mnist_pipeline",
    smallest_settings=Config.smallest_settings,
    processes=2,
    result_keys=SCORE_KEYS,
    make_rank_settings=lambda count: ("depth=3", f"stages={count}", "microbatches=2"),
    resume_variants=(
        ("engine=torch", "schedule=zero_bubble", "stages=2", "microbatches=2"),
        ("schedule=zbv", "stages=4", "stages_per_process=2", "depth=3", "microbatches=2", "clip=1", "dropout=0.2"),
    ),
    allowed_techniques=frozenset({"pipeline"}),
    tests_export=True,
    evaluation_variants=(("dtype=float64", "batch=16", "microbatches=2", "stages=3", "depth=3"),),
    cluster_settings=("data.name=digits", "data.train_limit=3200", "data.test_limit=500", "width=384", "epochs=5"),
    parity_transports=("tls", "two_level"),
)
