"""Train many cases of an experiment with one number of processes in one launch, for parity tests to compare.

A module of this package whose `train` trains a case is executed by `train_cases` and ends in `save_cases`:

    python -m tests.harness.MODULE [WORDS] OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.core.config import to_yaml
from common.data import prepare
from common.data.prepare import Prepared
from common.distributed import local_launcher, rendezvous
from common.distributed.rank_info import RankInfo
from common.runs.folder import Folder
from tests.harness import warm
from tests.harness.processes import environment


def prepare_for(cfg: Any, cache: str) -> Prepared:
    cfg.data.cache = cache
    return prepare.prepare(cfg.data)


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
    chosen = {case: settings(case + counted.format(count)) for case in cases}
    sets = {case: prepare_for(cfg, cache) for case, (cfg, _) in chosen.items()}
    runs = Path(tempfile.mkdtemp(dir=Path(out).parent))

    def body(place: RankInfo) -> None:
        with rendezvous.joined_world(place, chosen[cases[0]][0].launch) as world:
            results = {}
            for case, (cfg, special) in chosen.items():
                path = Folder.create(runs, "parity", to_yaml(cfg)).claim().path if world.is_main else None
                results[case] = train(cfg, special, world, sets[case], Folder(world.broadcast(path), 1))
            if world.is_main:
                torch.save(results, out)

    return local_launcher.run_ranks(body, int(count), 1, lambda: None)


def train_cases(module: str, folder: Path, cache: Path, count: int, cases: list[str], *before: str) -> dict[str, Any]:
    """What a module saved of cases with one number of processes; `before` are its own words."""
    out = folder / f"results-{count}.pt"
    words = [sys.executable, "-m", f"tests.harness.{module}", *before, str(out), str(cache), str(count), *cases]
    done = warm.execute(words, env=environment(), timeout=250)
    assert done.returncode == 0, done.stderr
    return dict(torch.load(out, weights_only=True))
