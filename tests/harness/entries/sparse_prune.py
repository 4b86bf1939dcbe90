"""Declarations of sparse_prune for the shared tests."""

from __future__ import annotations

from configs.sparse_prune import Config
from tests.harness.experiments.entry import Entry
from tests.harness.settings_text import split_cases

RESUME_VARIANTS = """
    schedule=rigl every=4 optim.name=sgd processes_per_node=2 export=false int8=false
    model=lenet5 scope=n:m sparsity=0.5 schedule=iterative criterion=gradient export=false int8=false
    model=lenet5 scope=structured l1=0.01 criterion=random export=false int8=false
"""

ENTRY = Entry(
    name="sparse_prune",
    own_technique="pruning",
    smallest_settings=Config.smallest_settings,
    processes=1,
    result_keys=(
        "test_accuracy",
        "samples_per_second",
        "sparsity",
        "nonzero",
        "masks",
        "bytes_compressed",
        "csr_seconds",
    ),
    make_rank_settings=lambda count: (
        f"processes_per_node={count}",
        "every=4",
        "criterion=taylor",
        "export=false",
        "int8=false",
    ),
    resume_variants=split_cases(RESUME_VARIANTS),
    page_settings=("every=2", "export=false"),
    page_commands_tested_elsewhere={
        "make exp NAME=sparse_prune ARGS=sweep=true": "tests/complete/test_sparse_prune_sweep.py"
    },
    tests_export=True,
    evaluation_variants=(("schedule=rigl", "every=4", "batch=16", "export=false", "int8=false"),),
    parity_transports=("memory", "tls"),
)
