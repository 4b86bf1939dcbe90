"""Declarations of amp_accum for the shared tests."""

from __future__ import annotations

from configs.amp_accum import Config
from tests.harness.experiments.entry import Entry

ENTRY = Entry(
    name="amp_accum",
    smallest_settings=(*Config.smallest_settings, "model=mlp"),
    processes=2,
    result_keys=(
        "test_accuracy",
        "samples_per_second",
        "training_bytes",
        "bytes_sent",
        "steps_skipped",
        "final_loss",
    ),
    # Three microbatches of 8 samples: the last window of an epoch of 320 samples has only one.
    make_rank_settings=lambda count: (
        f"processes_per_node={count}",
        "precision=fp32",
        "model=mlp",
        f"accumulate={2 if count == 3 else 3}",
    ),
    resume_variants=(
        ("model=mlp", "precision=fp16", "growth_interval=4", "init_scale=1e8", "accumulate=3", "dropout=0.3"),
        ("precision=bf16", "no_sync=false", "optim.name=adam", "clip=1", "accumulate=3", "shards=[1,4]"),
    ),
    page_settings=("batch=16",),  # fp16 is slow on most CPUs
    page_commands_tested_elsewhere={"make exp NAME=amp_accum ARGS=sweep=true": "tests/experiments/test_amp.py"},
    evaluation_variants=(("precision=fp16", "batch=16", "model=mlp", "optim.base_batch=16"),),
    parity_transports=("memory", "two_level", "tls"),
)
