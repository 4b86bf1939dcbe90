"""The entries of all experiments. Tests of requirements for all experiments use each entry.

tests/harness/entries/NAME.py declares the entry of an experiment. Experiments whose ranks all train the same model
need no declaration (`make_entry`).
"""

from __future__ import annotations

from typing import Any

import pytest

from common.config import config
from tests.harness.experiments.discovery import import_if_exists
from tests.harness.experiments.entry import SCORE_KEYS, Entry

__all__ = [
    "ARCHETYPE_ENTRIES", "ENTRIES", "ENTRY_BY_NAME", "MEASUREMENTS", "REPLICATED_ENTRY", "STAGED_ENTRY",
    "TRAINING_ENTRIES", "Entry",
]  # fmt: skip


def load_entry(name: str) -> Entry:
    """Return the declared entry of an experiment, or one for configs.dataparallel.Replicated if none is declared."""
    module = import_if_exists(f"tests.harness.entries.{name}")
    return module.ENTRY if module else make_default_entry(name)


def make_default_entry(name: str) -> Entry:
    """Return the entry of an experiment whose ranks all train the same model."""
    schema = config.import_schema(name)
    return Entry(
        name=name,
        smallest_settings=(*schema.smallest_settings, "checkpoint.every_steps=20"),
        processes=config.load_config(schema, [], {}).processes,
        result_keys=SCORE_KEYS,
        make_rank_settings=lambda count: (f"processes_per_node={count}",),
        loss_decreases_early=False,
    )


ENTRIES = [load_entry(name) for name in config.list_experiments()]
TRAINING_ENTRIES = [entry for entry in ENTRIES if entry.trains_model]
NO_MEASUREMENT = pytest.param("", marks=pytest.mark.skip(reason="all experiments train a model"))
MEASUREMENTS: list[Any] = [entry.name for entry in ENTRIES if not entry.trains_model] or [NO_MEASUREMENT]
"""Names of the experiments that train no model. If there are none, tests with this list are skipped."""
ENTRY_BY_NAME = {entry.name: entry for entry in ENTRIES}
STAGED_ENTRY = ENTRY_BY_NAME["mnist_pipeline"]
REPLICATED_ENTRY = ENTRY_BY_NAME["ddp_multinode"]
ARCHETYPE_ENTRIES = [STAGED_ENTRY, REPLICATED_ENTRY]
"""One entry for each way to distribute a model over ranks: partitioned into stages, or replicated."""
