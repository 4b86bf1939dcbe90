"""Declarations of mnist_pipeline for the shared tests."""

from __future__ import annotations

from configs.mnist_pipeline import Config
from tests.harness.experiments.entry import SCORE_KEYS, Entry

ENTRY = Entry(
    name="mnist_pipeline",
    smallest=Config.smallest_settings,
    processes=2,
    produces=SCORE_KEYS,
    spread=lambda count: ("depth=3", f"stages={count}", "microbatches=2"),
    others=(
        ("engine=torch", "schedule=zero_bubble", "stages=2", "microbatches=2"),
        ("stages=4", "stages_per_process=2", "depth=3", "microbatches=2", "optim.name=adam"),
    ),
    techniques=frozenset({"pipeline"}),
    exports=True,
    evaluated=(("dtype=float64", "batch=16", "microbatches=2", "stages=3", "depth=3"),),
    cluster_settings=("data.name=digits", "data.train_limit=3200", "data.test_limit=500", "width=384", "epochs=5"),
    transports=("tls", "two_level"),
)
