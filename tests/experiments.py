"""The one list of experiments: what every experiment must do is tested for each entry of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """An experiment, its smallest settings, and what its result must hold."""

    name: str
    smallest: tuple[str, ...]
    processes: int
    produces: tuple[str, ...]


EXPERIMENTS = [
    Entry(
        name="mnist_pipeline",
        smallest=("batch=16", "microbatches=2"),
        processes=2,
        produces=("test_accuracy", "test_loss", "test_samples", "samples_per_second"),
    ),
    Entry(
        name="ddp_multinode",
        smallest=("batch=16", "optim.base_batch=16", "optim.warmup=0"),
        processes=2,
        produces=("test_accuracy", "test_loss", "test_samples", "samples_per_second", "ranks", "communication_exposed"),
    ),
]
