"""The list of experiments. Requirements for all experiments are tested for each entry.

tests/harness/entries/NAME.py declares the entry of an experiment. Experiments whose ranks all train the same model
need no declaration (`make_entry`).
"""

from __future__ import annotations

from common.config import config
from tests.harness.experiments.discovery import import_declared
from tests.harness.experiments.entry import SCORES, Entry

__all__ = ["ARCHETYPES", "BY_NAME", "EXPERIMENTS", "REPLICATED", "STAGED", "TRAINING", "Entry"]


def load_entry(name: str) -> Entry:
    """Return the declared entry of an experiment, or one for configs.dataparallel.Replicated if none is declared."""
    module = import_declared(f"tests.harness.entries.{name}")
    return module.ENTRY if module else make_entry(name)


def make_entry(name: str) -> Entry:
    """Return the entry of an experiment whose ranks all train the same model."""
    schema = config.import_schema(name)
    return Entry(
        name=name,
        smallest=(*schema.smallest_settings, "checkpoint.every_steps=20"),
        processes=config.load_config(schema, [], {}).processes,
        produces=SCORES,
        spread=lambda count: (f"processes_per_node={count}",),
        learns_at_once=False,
    )


EXPERIMENTS = [load_entry(name) for name in config.list_experiments()]
TRAINING = [entry for entry in EXPERIMENTS if entry.trains]
BY_NAME = {entry.name: entry for entry in EXPERIMENTS}
STAGED = BY_NAME["mnist_pipeline"]
REPLICATED = BY_NAME["ddp_multinode"]
ARCHETYPES = [STAGED, REPLICATED]
"""The ways to distribute a model over ranks: partitioned into stages, or replicated."""
