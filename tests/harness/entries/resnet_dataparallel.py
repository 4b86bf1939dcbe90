"""Declarations of resnet_dataparallel for the shared tests."""

from __future__ import annotations

from configs.resnet_dataparallel import Config
from tests.harness.experiments.entry import SCORE_KEYS, Entry

ENTRY = Entry(
    name="resnet_dataparallel",
    smallest_settings=Config.smallest_settings,
    processes=2,
    result_keys=(*SCORE_KEYS, "devices", "memory"),
    make_rank_settings=lambda count: ("model=mlp", "compare=false", f"processes_per_node={count}"),
    page_settings=("batch=8", "steps=3", "data.test_limit=20", "compare=false"),
    page_commands_tested_elsewhere={
        "make exp NAME=resnet_dataparallel ARGS=sweep=true": "tests/experiments/test_resnet_dataparallel.py"
    },
)
