"""Train many cases of an experiment with one number of processes in one launch, for parity tests to compare.

A module of this package whose `train` trains a case is executed by `train_cases` and ends in `save_cases`:

    python -m tests.harness.MODULE [WORDS] OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.config.config import format_yaml
from common.config.config_keys import replace_values
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.runs.folder import RunFolder
from common.training.run import Run
from tests.harness import warm
from tests.harness.processes import environment


def prepare_for(cfg: Any, cache: str) -> PreparedDataset:
    return prepare.prepare_dataset(dataclasses.replace(cfg.data, cache=cache))


def save_cases(
    settings: Callable[[str], tuple[Any, str]],
    train: Callable[..., dict[str, Any]],
    out: str,
    cache: str,
    count: str,
    *cases: str,
    counted: str = ",processes_per_node={}",
) -> int:
    """Train every case in the same `count` processes, one after the other, and save rank 0's results; exit status.

    `counted` is what tells a case how many processes there are.
    """
    chosen = {}
    for case in cases:
        cfg, special = settings(case + counted.format(count))
        chosen[case] = replace_values(cfg, {"data.cache": cache}), special
    sets = {case: prepare_for(cfg, cache) for case, (cfg, _) in chosen.items()}
    runs = Path(tempfile.mkdtemp(dir=Path(out).parent))

    def body(place: RankInfo) -> None:
        with rendezvous.join_world(place, chosen[cases[0]][0].launch) as world:
            results = {}
            for case, (cfg, special) in chosen.items():
                made = RunFolder.create(runs, "parity", format_yaml(cfg)).claim_attempt() if world.is_main else None
                path = Path(world.broadcast(str(made.path) if made else None))
                results[case] = train(cfg, special, world, sets[case], RunFolder(path, 1))
            if world.is_main:
                torch.save(results, out)

    return local_launcher.run_ranks(body, int(count), 1, lambda: None)


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put other objects in place of attributes: (of what, name, object)."""
    with contextlib.ExitStack() as stack:
        for of, name, value in changes:
            stack.enter_context(unittest.mock.patch.object(of, name, value))
        yield


def train_script(script: Any, run: Run, *changes: tuple[Any, str, Any]) -> dict[str, Any]:
    """Run an experiment's own main, with some of its parts replaced; losses, full state and scores on rank 0."""
    torch.manual_seed(1234)
    with replaced(changes):
        script.main(run.cfg, run)
    assert run.state is not None
    state = full_state(run.state.parts)
    run.close()
    losses = [row["loss"] for row in run.folder.read_metrics() if "loss" in row] if run.world.is_main else []
    return {"losses": losses, "state": state, "scores": run.scores}


def full_state(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of this rank's parts of a model, sharded ones gathered. All ranks call it."""
    state = {name: value for part in parts for name, value in part.state_dict().items()}
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in state.items()}


def sums_of_ranks(state: dict[str, Tensor]) -> list[float]:
    """The sum over a state, of each rank: equal where all hold the same. All ranks call it."""
    own = torch.tensor([float(sum(v.double().sum() for v in state.values()))], dtype=torch.float64)
    sums = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, own)
    return [float(value) for value in sums]


def train_cases(module: str, folder: Path, cache: Path, count: int, cases: list[str], *before: str) -> dict[str, Any]:
    """What a module saved of cases with one number of processes; `before` are its own words."""
    out = folder / f"results-{count}.pt"
    words = [sys.executable, "-m", f"tests.harness.{module}", *before, str(out), str(cache), str(count), *cases]
    done = warm.execute(words, env=environment(), timeout=250)
    assert done.returncode == 0, done.stderr
    return dict(torch.load(out, weights_only=True))
