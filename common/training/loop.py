"""What the mains of experiments have in common: epochs with an evaluation after each, and the words about them."""

from __future__ import annotations

from collections.abc import Callable

from common.data.loader import AccumulationLoader, Loader
from common.distributed.rendezvous import World
from common.measure.memory import read_peak
from common.training.run import Run
from configs.shared import Experiment


def total_steps(cfg: Experiment, loader: Loader | AccumulationLoader) -> int:
    """The optimizer steps of the whole run."""
    return cfg.total_steps(loader.steps)


def train(
    run: Run,
    loader: Loader | AccumulationLoader,
    step: int,
    epoch: Callable[[int], int],
    evaluate: Callable[[], dict[str, float]],
) -> dict[str, float]:
    """Epochs from `step` to `run.total`, with an evaluation after each; returns the last one's scores.

    `epoch` trains on the rest of the loader's epoch: it gets the steps done and returns the steps then done.
    """
    while True:
        if step < run.total and not run.unevaluated:  # not where an evaluation is missing
            step = epoch(step)
        scores = run.evaluate(step, evaluate)
        words = f"test_loss {scores['test_loss']:.4f}  test_accuracy {scores['test_accuracy']:.2%}"
        run.say(f"epoch {step / loader.steps:.3g}  step {step}  {words}")
        if step >= run.total:
            held = run.world.gather(read_peak(run.world.device))
            run.memory = {f"process {rank}": most for rank, most in enumerate(held)}
            return scores


def rows(run: Run, world: World, scores: dict[str, float]) -> dict[str, str]:
    """The first rows of the final table."""
    seconds, rate = run.step_seconds(), run.samples_per_second()
    return {
        "data": f"{run.prepared.name}, {scores['test_samples']} test samples",
        "test accuracy": f"{scores['test_accuracy']:.2%}",
        "test loss": f"{scores['test_loss']:.4f}",
        "throughput": f"{rate:,.0f} samples/s  (step {seconds * 1e3:.2f} ms, first steps and evaluation left out)",
        "processes": f"{world.size} with {world.threads} threads each on {world.device.type} of "
        + ", ".join(sorted(set(world.hosts))),
    }
