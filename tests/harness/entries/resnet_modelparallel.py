"""Declarations of resnet_modelparallel for the shared tests."""

from __future__ import annotations

from configs.resnet_modelparallel import Config
from tests.harness.experiments.entry import SCORE_KEYS, Entry

ENTRY = Entry(
    name="resnet_modelparallel",
    smallest_settings=Config.smallest_settings,
    processes=2,
    result_keys=(*SCORE_KEYS, "idle_share", "memory"),
    make_rank_settings=lambda count: ("width=4", f"stages={count}", "split=[]", "split_size=12", "plot=false"),
    resume_variants=(
        ("width=8", "replicas=2", "split_size=6", "plot=false", "zero1=true"),
        ("width=8", "devices=[cpu,cpu]", "split_size=8", "plot=false"),
        ("width=8", "schedule=zero_bubble", "split_size=12", "plot=false"),
    ),
    page_settings=("width=8", "batch=16", "plot=false"),
    page_commands_tested_elsewhere={
        "make exp NAME=resnet_modelparallel ARGS=sweep=true": "tests/experiments/test_modelparallel.py"
    },
    tests_export=True,
    evaluation_variants=(
        ("replicas=2", "width=4", "batch=16", "split_size=4", "plot=false", "dtype=float64"),
        ("channels_last=true", "mode=single", "width=16", "batch=16", "plot=false"),
    ),
)
