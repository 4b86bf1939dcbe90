"""The one list of experiments: what every experiment must do is tested for each entry of it.

tests/harness/entries/NAME.py declares the entry of an experiment. An experiment whose ranks all train the same model
needs none (`make_entry`).
"""

from __future__ import annotations

from common.config import config
from tests.harness.declared import import_declared
from tests.harness.entry import SCORES, Entry

__all__ = ["ARCHETYPES", "BY_NAME", "EXPERIMENTS", "REPLICATED", "STAGED", "TRAINING", "Entry"]


def load_entry(name: str) -> Entry:
    """Return the declared entry of an experiment, or one for configs.dataparallel.Replicated if none is declared."""
    module = import_declared(f"tests.harness.entries.{name}")
    return module.ENTRY if module else make_entry(name)


def make_entry(name: str) -> Entry:
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
STAGED, REPLICATED = BY_NAME["mnist_pipeline"], BY_NAME["ddp_multinode"]
ARCHETYPES = [STAGED, REPLICATED]
"""How a run spreads over processes: the model cut into stages, or a replica of it in each."""
