"""Train many cases of an experiment with one number of ranks in one launch, for parity tests.

`train_cases` executes a module of this package that defines `train` and calls `save_cases`:

    python -m tests.harness.parity.MODULE [ARGUMENT ...] OUT_FILE CACHE RANKS key=value,key=value ...
        one argument per case
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
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
from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment


def prepare_for(cfg: Any, cache: str) -> PreparedDataset:
    return prepare.prepare_dataset(dataclasses.replace(cfg.data, cache=cache))


def split_case(text: str) -> list[str]:
    """Split a case at its commas, except those inside the brackets of a list."""
    return re.split(r",(?![^\[]*\])", text)


def save_cases(
    settings: Callable[[str], tuple[Any, str]],
    train: Callable[..., dict[str, Any]],
    out: str,
    cache: str,
    count: str,
    *cases: str,
    counted: str = ",processes_per_node={}",
) -> int:
    """Train every case on the same `count` ranks, one after another. Save rank 0's results; return the exit status.

    `counted` is the setting for the number of ranks, which is appended to each case.
    """
    configs = {}
    special_words = {}
    datasets = {}
    for case in cases:
        cfg, special_words[case] = settings(case + counted.format(count))
        configs[case] = replace_values(cfg, {"data.cache": cache})
        datasets[case] = prepare_for(configs[case], cache)
    runs = Path(tempfile.mkdtemp(dir=Path(out).parent))

    def claim_folder(cfg: Any, world: rendezvous.World) -> RunFolder:
        path = None
        if world.is_main:
            path = str(RunFolder.create(runs, "parity", format_yaml(cfg)).claim_attempt().path)
        return RunFolder(Path(world.broadcast(path)), 1)

    def train_on_rank(rank_info: RankInfo) -> None:
        with rendezvous.join_world(rank_info, configs[cases[0]].launch) as world:
            results = {}
            for case, cfg in configs.items():
                results[case] = train(cfg, special_words[case], world, datasets[case], claim_folder(cfg, world))
            if world.is_main:
                torch.save(results, out)

    return local_launcher.run_ranks(train_on_rank, int(count), 1, lambda: None)


@contextlib.contextmanager
def replace_attributes(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes temporarily: (owner, name, replacement)."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in changes:
            stack.enter_context(unittest.mock.patch.object(owner, name, replacement))
        yield


def train_script(script: Any, run: Run, *changes: tuple[Any, str, Any]) -> dict[str, Any]:
    """Run an experiment's main with replaced attributes; return losses (on rank 0), full state and scores."""
    torch.manual_seed(1234)
    with replace_attributes(changes):
        script.main(run.cfg, run)
    assert run.state is not None
    state = full_state(run.state.parts)
    run.close()
    losses = []
    if run.world.is_main:
        losses = [row["loss"] for row in run.folder.read_metrics() if "loss" in row]
    return {"losses": losses, "state": state, "scores": run.scores}


def full_state(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return parameters and buffers of this rank's parts of a model, sharded ones gathered. All ranks call it."""
    state = {}
    for part in parts:
        for name, tensor in part.state_dict().items():
            state[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
    return state


def sums_of_ranks(state: dict[str, Tensor]) -> list[float]:
    """Return each rank's sum over a state, which is equal if the states are equal. All ranks call it."""
    rank_sum = torch.zeros(1, dtype=torch.float64)
    for tensor in state.values():
        rank_sum += tensor.double().sum()
    sums = [torch.zeros_like(rank_sum) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, rank_sum)
    return torch.cat(sums).tolist()


def train_cases(module: str, folder: Path, cache: Path, count: int, cases: list[str], *before: str) -> dict[str, Any]:
    """Execute a module with cases on `count` ranks, and load its results; `before` are arguments before the file."""
    results_file = folder / f"results-{count}.pt"
    arguments = [*before, str(results_file), str(cache), str(count), *cases]
    command = [sys.executable, "-m", f"tests.harness.parity.{module}", *arguments]
    process = execution.execute_command(command, env=make_environment(), timeout=250)
    assert process.returncode == 0, process.stderr
    return dict(torch.load(results_file, weights_only=True))
