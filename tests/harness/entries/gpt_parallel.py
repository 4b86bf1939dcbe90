"""Declarations of gpt_parallel for the shared tests."""

from __future__ import annotations

from configs.gpt_parallel import Config
from tests.harness.experiments.entry import Entry
from tests.harness.settings_text import split_settings

SMALL_NETWORK = split_settings("data.name=text data.context=16 width=16 layers=2 heads=2")
RANK_SETTINGS = (*SMALL_NETWORK, "dropout=0.2", "masked=0.3", "accumulate=2")
VARIED = (*SMALL_NETWORK, "dropout=0.3", "accumulate=3", "masked=0.3", "evaluate_every=7")
RESUME_VARIANTS = (
    (*VARIED, "tensor=2", "sequence=true"),
    (*VARIED, "context=2"),
    (*VARIED, "fsdp=2", "reshard=false"),
    (*VARIED, "replicas=2"),
    (*VARIED, "replicas=2", "zero1=true"),
    (*VARIED, "stages=2"),
)

ENTRY = Entry(
    name="gpt_parallel",
    own_technique="parallel_layout",
    data_name="text",
    smallest_settings=(*Config.smallest_settings, "evaluate_every=0"),
    processes=2,
    result_keys=("test_loss", "bits_per_byte", "bigram_loss", "text_sha256", "sample", "samples_per_second"),
    make_rank_settings=lambda count: (f"replicas={count}", *RANK_SETTINGS),
    resume_variants=RESUME_VARIANTS,
    page_settings=(*SMALL_NETWORK, "layers=4"),
    page_commands_tested_elsewhere={
        "make sample 'RUN=<id>' 'TEXT=def ' TEMPERATURE=0.7 TOP_K=40": "tests/experiments/test_gpt_parallel.py",
    },
    evaluation_variants=((*SMALL_NETWORK, "batch=18", "tensor=2", "precision=bf16"),),
    tests_export=True,
    parity_transports=("memory",),
)
