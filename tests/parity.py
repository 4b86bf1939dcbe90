"""Train many pipeline cases of one world size in one launch, for test_parity.py to compare.

    python tests/parity.py OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case

A case may begin with `lose_relu` or `lose_microbatch`: it then makes that mistake.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import config, data, launch, optim, prepare, processes, splits
from common.config import to_yaml
from common.evaluate import classify
from common.folder import Folder
from common.launch import Place, World
from common.pipeline import Pipeline
from common.run import Run
from common.schedules import Action
from configs.mnist_pipeline import Config
from experiments import mnist_pipeline

SETTINGS = {
    "data.name": "digits",
    "data.train_limit": "500",  # 20 batches of 24 an epoch, and 20 samples left out
    "data.test_limit": "100",
    "dtype": "float64",
    "width": "32",
    "depth": "8",
    "batch": "24",
    "microbatches": "6",
    "eval_batch": "32",  # three full batches and one of 4
    "optim.lr": "0.02",  # SGD: Adam would not notice a wrong factor
    "epochs": "2",
    "steps": "30",
    "seed": "7",
}


def settings(text: str, **extra: str) -> tuple[Config, str]:
    """The settings of a case, and the mistake it makes, if any."""
    words = text.split(",")
    mistake = words.pop(0) if "=" not in words[0] else ""
    return config.resolve(Config, [SETTINGS | extra | dict(word.split("=") for word in words)]), mistake


@torch.no_grad()
def widen(parameters: Iterable[torch.Tensor]) -> None:
    """Scale weights to He's initialisation: with torch's, a network this deep learns next to nothing in 30 steps."""
    for parameter in parameters:
        if parameter.dim() > 1:
            parameter.mul_(6**0.5)


def sabotage(pipe: Pipeline, mistake: str) -> None:
    if mistake == "lose_relu" and 1 in pipe.local:
        layer: Any = pipe.local[1][0]
        layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight, layer.bias)
    if mistake == "lose_microbatch":
        backward = pipe._backward

        def forgetful(action: Action, gradient: Tensor | None) -> Any:
            if action.microbatch == 5 and pipe.has_last:
                x, out = pipe.saved[action.stage, action.microbatch]
                pipe.saved[action.stage, action.microbatch] = x, out * 0
            return backward(action, gradient)

        pipe._backward = forgetful  # type: ignore[method-assign]


def train(cfg: Config, mistake: str, world: World, prepared: prepare.Prepared, folder: Folder) -> dict[str, Any]:
    """One case on this process; on rank 0 its losses, joined parameters and scores."""
    torch.manual_seed(1234)
    train_set, test_set = data.load(prepared, cfg.data)
    run = Run(cfg, folder, world, prepared)
    pipe = mnist_pipeline.build(cfg, world, run, torch.float64)
    widen(pipe.module.parameters())
    sabotage(pipe, mistake)
    optimizer = optim.make(pipe.module.parameters(), cfg.optim)
    ends: Any = {"inputs": pipe.has_first, "targets": pipe.has_last}
    loader = data.Loader(train_set, cfg.batch, cfg.seed, world.device, torch.float64, block=3, **ends)
    run.source, run.total = pipe.last_rank, cfg.steps
    step = 0
    while step < cfg.steps:
        step = mnist_pipeline.train_epoch(cfg, pipe, optimizer, loader, run, step, cfg.steps)
    run.flush()
    pipe.train(False)
    scores = classify(pipe.predict, test_set, world, batch=cfg.eval_batch, dtype=torch.float64, inputs=pipe.has_first)
    states = world.gather(pipe.state_dict())
    if not world.is_main:
        return {}
    losses = [row["loss"] for row in folder.metrics()]
    return {"losses": losses, "state": splits.join(states), "scores": scores}


def main(out: str, cache: str, count: int, cases: list[str]) -> int:
    prepared = prepare.prepare_digits(Path(cache))
    runs = Path(tempfile.mkdtemp())

    def body(place: Place) -> None:
        first, _ = settings(cases[0])
        with launch.group(place, first.launch) as world:
            results = {}
            for case in cases:
                cfg, mistake = settings(case)
                path = Folder.create(runs, "parity", to_yaml(cfg)).claim().path if world.is_main else None
                results[case] = train(cfg, mistake, world, prepared, Folder(world.broadcast(path), 1))
            if world.is_main:
                torch.save(results, out)

    return processes.fork_all(body, count, 1, lambda: None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
