"""Train many cases of an experiment with stages, of one world size, in one launch, for the parity tests to compare.

    python -m tests.harness.parity NAME OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case

A case may begin with `lose_relu` or `lose_microbatch`: it then makes that mistake.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import config, data, launch, optim, prepare, processes, splits
from common.config import to_yaml
from common.evaluate import classify
from common.folder import Folder
from common.launch import Place, World
from common.pipeline import Pipeline
from common.run import Run
from common.schedules import Action
from configs import mnist_pipeline as mnist
from configs import resnet_modelparallel as resnet
from experiments import mnist_pipeline, resnet_modelparallel
from tests.harness.processes import ROOT, environment

PIPELINE = {
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

RESNET = {
    "data.name": "generated",
    "data.samples": "43",  # 5 batches of 8 an epoch: train and eval in turns
    "data.image_size": "32",
    "dtype": "float64",
    "model": "resnet18",
    "batch": "8",
    "split_size": "2",
    "eval_batch": "5",
    "optim.lr": "0.02",
    "epochs": "2",
    "steps": "10",
    "seed": "7",
    "launch.threads": "1",
    "plot": "false",
}


@dataclass(frozen=True)
class Trained:
    """How the cases of an experiment are trained."""

    schema: type[Any]
    settings: dict[str, str]
    build: Callable[..., Any]
    """From settings, the training set, world and run to the stages."""
    script: Any


def build_pipeline(cfg: Any, train: data.Images, world: World, run: Run) -> Pipeline:
    pipe = mnist_pipeline.build(cfg, world, run, torch.float64)
    widen(pipe.module.parameters())
    return pipe


def build_resnet(cfg: Any, train: data.Images, world: World, run: Run) -> Any:
    return resnet_modelparallel.build(cfg, train.shape, train.classes, world, run)


@torch.no_grad()
def widen(parameters: Iterable[torch.Tensor]) -> None:
    """Scale weights to He's initialisation: with torch's, a network this deep learns next to nothing in 30 steps."""
    for parameter in parameters:
        if parameter.dim() > 1:
            parameter.mul_(6**0.5)


def sabotage(pipe: Pipeline, mistake: str) -> None:
    if mistake == "lose_relu" and 1 in pipe.local:
        layer: Any = pipe.local[1][0]
        layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)
    if mistake == "lose_microbatch":
        backward = pipe._backward

        def forgetful(action: Action, gradient: Tensor | None) -> Any:
            if action.microbatch == 5 and pipe.has_last:
                x, out = pipe.saved[action.stage, action.microbatch]
                pipe.saved[action.stage, action.microbatch] = x, out * 0
            return backward(action, gradient)

        pipe._backward = forgetful  # type: ignore[method-assign]


EXPERIMENTS = {
    "mnist_pipeline": Trained(mnist.Config, PIPELINE, build_pipeline, mnist_pipeline),
    "resnet_modelparallel": Trained(resnet.Config, RESNET, build_resnet, resnet_modelparallel),
}


def settings(name: str, text: str, **extra: str) -> tuple[Any, str]:
    """The settings of a case, and the mistake it makes, if any."""
    words = re.split(r",(?![^\[]*\])", text)
    mistake = words.pop(0) if "=" not in words[0] else ""
    kind = EXPERIMENTS[name]
    return config.resolve(kind.schema, [kind.settings | extra | dict(word.split("=") for word in words)]), mistake


def train(
    kind: Trained, cfg: Any, mistake: str, world: World, prepared: prepare.Prepared, folder: Folder
) -> dict[str, Any]:
    """One case on this process; on rank 0 its losses, joined parameters and scores."""
    torch.manual_seed(1234)
    train_set, test_set = data.load(prepared, cfg.data)
    run = Run(cfg, folder, world, prepared)
    pipe = kind.build(cfg, train_set, world, run)
    sabotage(pipe, mistake)
    optimizer = optim.make(pipe.module.parameters(), cfg.optim)
    ends: Any = {"inputs": pipe.has_first, "targets": pipe.has_last}
    loader = data.Loader(train_set, cfg.batch, cfg.seed, world.device, torch.float64, block=3, **ends)
    run.source, run.total = pipe.last_rank, cfg.steps
    step = 0
    while step < cfg.steps:
        step = kind.script.train_epoch(cfg, pipe, optimizer, loader, run, step, cfg.steps)
        pipe.train(False)
        parts: Any = {"batch": cfg.eval_batch, "dtype": torch.float64, "inputs": pipe.has_first}
        scores = classify(pipe.predict, test_set, world, **parts)
    run.flush()
    states = world.gather({name: value for part in pipe.local.values() for name, value in part.state_dict().items()})
    run.close()
    if not world.is_main:
        return {}
    losses = [row["loss"] for row in folder.metrics()]
    return {"losses": losses, "state": splits.join(states), "scores": scores}


def main(name: str, out: str, cache: str, count: int, cases: list[str]) -> int:
    here = {"data.cache": cache}
    first, _ = settings(name, cases[0], **here)
    prepared = prepare.prepare(first.data)
    runs = Path(tempfile.mkdtemp())

    def body(place: Place) -> None:
        with launch.group(place, first.launch) as world:
            results = {}
            for case in cases:
                cfg, mistake = settings(name, case, **here)
                path = Folder.create(runs, "parity", to_yaml(cfg)).claim().path if world.is_main else None
                folder = Folder(world.broadcast(path), 1)
                results[case] = train(EXPERIMENTS[name], cfg, mistake, world, prepared, folder)
            if world.is_main:
                torch.save(results, out)

    return processes.fork_all(body, count, 1, lambda: None)


TOLERANCE = 1e-9


def normalised(prepared: prepare.Prepared, part: str, limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Images in float64, and labels."""
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in data.STATISTICS[prepared.name])
    pixels = torch.from_numpy(prepared.array(f"{part}_images")[:limit]).double()
    images = (pixels / 255 - mean) / std
    return images, torch.from_numpy(prepared.array(f"{part}_labels")[:limit]).long()


@torch.no_grad()
def scored(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """What an evaluation should find."""
    logits = model.eval()(images)
    return {
        "test_loss": F.cross_entropy(logits, labels).item(),
        "test_accuracy": (logits.argmax(1) == labels).double().mean().item(),
        "test_samples": len(labels),
    }


def train_in_processes(
    folder: Path, cache: Path, processes: int, wanted: list[str], name: str = "mnist_pipeline"
) -> dict[str, Any]:
    """The results of cases with one number of processes, trained in one launch."""
    out = folder / f"results-{processes}.pt"
    script = [sys.executable, "-m", "tests.harness.parity", name, str(out), str(cache), str(processes), *wanted]
    done = subprocess.run(script, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(torch.load(out, weights_only=True))


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What differs by more than the tolerance, or is missing."""
    wrong = []
    if len(found["losses"]) != len(expected["losses"]):
        wrong.append("number of losses")
    gaps = [abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=False)]
    if not max(gaps) <= TOLERANCE:
        wrong.append(f"losses by {max(gaps):.2g}")
    if found["state"].keys() != expected["state"].keys():
        wrong.append("names of parameters")
    for name in found["state"].keys() & expected["state"].keys():
        gap = (found["state"][name] - expected["state"][name]).abs().max().item()
        if not gap <= TOLERANCE:
            wrong.append(f"{name} by {gap:.2g}")
    for name, value in expected["scores"].items():
        if not abs(found["scores"][name] - value) <= TOLERANCE:
            wrong.append(f"{name} by {abs(found['scores'][name] - value):.2g}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:]))
