"""The one list of experiments: what every experiment must do is tested for each entry of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """An experiment, its smallest settings, and what its result must hold."""

    name: str
    smallest: tuple[str, ...]
    processes: int
    produces: tuple[str, ...]
    spread: Callable[[int], tuple[str, ...]]
    """The settings that give a run so many processes; they take a batch of 24."""
    resumed: tuple[str, ...] = ()
    """More settings of a run that must go on to the bit."""


EXPERIMENTS = [
    Entry(
        name="mnist_pipeline",
        smallest=("batch=16", "microbatches=2"),
        processes=2,
        produces=("test_accuracy", "test_loss", "test_samples", "samples_per_second"),
        spread=lambda count: ("depth=3", f"stages={count}", "microbatches=2"),
    ),
    Entry(
        name="ddp_multinode",
        smallest=("batch=16", "optim.base_batch=16", "optim.warmup=0"),
        processes=2,
        produces=("test_accuracy", "test_loss", "test_samples", "samples_per_second", "ranks", "communication_exposed"),
        spread=lambda count: (f"processes_per_node={count}",),
    ),
    Entry(
        name="amp_accum",
        smallest=("batch=16", "optim.base_batch=16", "optim.warmup=0"),
        processes=2,
        produces=("test_accuracy", "samples_per_second", "peak_memory", "bytes_sent", "steps_skipped", "final_loss"),
        # three microbatches of 8 samples: the last window of an epoch of 320 has only one of them
        spread=lambda count: (f"processes_per_node={count}", "precision=fp32", f"accumulate={2 if count == 3 else 3}"),
        resumed=("model=mlp", "precision=fp16", "growth_interval=4"),
    ),
]
