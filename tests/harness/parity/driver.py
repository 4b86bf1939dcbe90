"""Train the cases of a parity method on one number of ranks in one launch.

    python -m tests.harness.parity.driver METHOD OUT_FILE CACHE RANKS CASE ...

METHOD is the name of a `ParityMethod`, such as `stage_cases:PIPELINE`. The ranks are forked once. Each case has a
process group and launch settings of its own, so that no state of a group affects the next case.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.config.config import format_yaml
from common.config.lookup import import_object
from common.data import prepare
from common.data.prepare import PreparedDataset
from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.runs.result import parse_result
from common.training.run import Run
from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment
from tests.harness.parity.method import SEED, Outcome, ParityMethod, collect_state, replace_attributes

PACKAGE = "tests.harness.parity"
DYNAMO_SETTINGS = ("recompute=", "fsdp", "tensor=")
"""Settings for which torch imports torch._dynamo in the ranks. The import takes seconds."""


def train_cases(method: ParityMethod, folder: Path, cache: Path, ranks: int, cases: Sequence[str]) -> dict[str, Any]:
    """Train cases on `ranks` ranks in another process. Save their outcomes in `folder`, and return them by case."""
    out = folder / f"results-{ranks}.pt"
    arguments = [method.name, str(out), str(cache), str(ranks), *cases]
    command = [sys.executable, "-m", f"{PACKAGE}.driver", *arguments]
    timeout = max(250, 30 * len(cases))  # `make verify` trains all cases of a list
    process = execution.execute_command(command, env=make_environment(), timeout=timeout)
    assert process.returncode == 0, process.stderr
    return load_outcomes(folder, ranks)


def load_outcomes(folder: Path, ranks: int) -> dict[str, Any]:
    """Load the outcomes that `train_cases` has saved."""
    file = folder / f"results-{ranks}.pt"
    return dict(torch.load(file, weights_only=True))


# ---- in the launched program


@dataclasses.dataclass(frozen=True)
class Case:
    """A case that is ready to be trained."""

    text: str
    cfg: Any
    prepared: PreparedDataset


def prepare_case(method: ParityMethod, text: str, cache: Path, ranks: int) -> Case:
    cfg = method.build_config(text, cache, ranks)
    assert cfg.processes == ranks, f"{text} has {cfg.processes} ranks"
    prepared = prepare.prepare_dataset(cfg.data)
    return Case(text, cfg, prepared)


def train_on_rank(method: ParityMethod, cases: Sequence[Case], out: Path, rank_info: RankInfo) -> None:
    """Train all cases on this rank. Rank 0 saves their outcomes. An error names its case, and ends the launch."""
    runs = Path(f"{out}.runs")
    outcomes = {}
    for number, case in enumerate(cases):
        group_info = dataclasses.replace(rank_info, master=f"{rank_info.master}-{number}")
        try:
            with rendezvous.join_world(group_info, case.cfg.launch) as world:
                outcomes[case.text] = train_case(method, case, world, runs)
        except Exception as error:
            error.add_note(f"The case is {case.text}.")
            raise
    if rank_info.rank == 0:
        torch.save(outcomes, out)


def train_case(method: ParityMethod, case: Case, world: World, runs: Path) -> Outcome:
    """Train a case on this rank, and return its outcome on rank 0."""
    run_folder = claim_run_folder(case, world, runs)
    run = Run(case.cfg, run_folder, Ranks(world), case.prepared)
    change, _ = method.split_case(case.text)
    planted = method.changes.get(change, ())

    torch.manual_seed(SEED)
    with replace_attributes(*method.replacements, *planted):
        further_results = method.train(case.cfg, run)
    assert run.state is not None
    state_of_rank = collect_state(run.state.parts)
    torch.save(state_of_rank, run_folder.path / f"state-{world.rank}.pt")
    dist.barrier()
    run.close()
    if not world.is_main:
        return {}

    states = [torch.load(run_folder.path / f"state-{rank}.pt", weights_only=True) for rank in range(world.size)]
    state, differing_ranks = merge_states(states)
    rows = run_folder.read_metrics()
    losses = [row["loss"] for row in rows if "loss" in row]
    losses = [math.nan if loss is None else loss for loss in losses]
    outcome = {"losses": losses, "state": state, "scores": run.scores, "rows": rows}
    outcome["norms"] = [row["gradient_norm"] for row in rows if "gradient_norm" in row]
    outcome["differing_ranks"] = differing_ranks
    outcome["result"] = parse_result(run_folder.result).flatten_values()
    return outcome | (further_results or {})


def claim_run_folder(case: Case, world: World, runs: Path) -> RunFolder:
    """Return the same new run folder on all ranks."""
    path = None
    if world.is_main:
        created = RunFolder.create(runs, "parity", format_yaml(case.cfg))
        path = str(created.claim_attempt().path)
    path = world.broadcast(path)
    return RunFolder(Path(path), 1)


def merge_states(states: Sequence[dict[str, Tensor]]) -> tuple[dict[str, Tensor], list[int]]:
    """Return the state of the full model, and the ranks with another tensor than a rank before."""
    merged: dict[str, Tensor] = {}
    differing_ranks = []
    for rank, state in enumerate(states):
        shared_names = merged.keys() & state.keys()
        is_equal = [torch.equal(merged[name], state[name]) for name in shared_names]
        if not all(is_equal):
            differing_ranks.append(rank)
        merged = state | merged
    return merged, differing_ranks


def main(method_name: str, out: str, cache: str, ranks: str, *texts: str) -> int:
    """Train all cases, and return the exit status."""
    method = import_object(f"{PACKAGE}.{method_name}")
    cases = [prepare_case(method, text, Path(cache), int(ranks)) for text in texts]
    if any(setting in text for text in texts for setting in DYNAMO_SETTINGS):
        import torch._dynamo  # noqa: F401 (the ranks share it after the fork)
    train = functools.partial(train_on_rank, method, cases, Path(out))
    return local_launcher.run_ranks(train, int(ranks), 1, lambda: None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
