"""With the backend `builtin`, every experiment, messages and FSDP2 equal one process, in float64, to 1e-9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import read_json
from tests.harness.commands.processes import FinishedRun, run_experiment
from tests.harness.environment.randomness import draw_cases
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.experiments.registry import ENTRIES, Entry
from tests.harness.parity.ddp_cases import DDP
from tests.harness.parity.driver import train_cases
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import TOLERANCE, list_differences
from tests.harness.parity.stage_cases import PIPELINE
from tests.harness.ranks.programs import check_program
from tests.harness.runs.resuming import ONE_THREAD

STEPS = 5
EXACT = ("dtype=float64", "checkpoint.every_steps=0", ONE_THREAD, f"steps={STEPS}")
BUILTIN = ("launch.backend=builtin", "launch.transport=network")
WIRE = ",".join((*BUILTIN, "transport=network"))


def read_world(completed: FinishedRun) -> dict[str, Any]:
    """Return world.json of the first attempt."""
    return read_json(completed.folder.list_attempts()[0].attempt_folder / "world.json")


def check_equal_losses(trained: FinishedRun, single_process: FinishedRun) -> None:
    assert trained.returncode == 0, trained.stderr
    assert single_process.returncode == 0, single_process.stderr
    assert trained.losses == pytest.approx(single_process.losses, abs=TOLERANCE, rel=0)
    assert len(trained.losses) == STEPS


@pytest.mark.parametrize("entry", draw_cases("built-in backend", ENTRIES, 5), ids=lambda entry: entry.name)
def test_two_ranks_equal_one(entry: Entry, tmp_path: Path, quick: tuple[str, ...]) -> None:
    """A pure measurement itself compares its outputs with arithmetic."""
    settings = (*quick, *EXACT)
    two_ranks = run_experiment(entry.name, *settings, *entry.make_rank_settings(2), *BUILTIN, runs=tmp_path / "two")
    assert two_ranks.returncode == 0, two_ranks.stderr
    assert read_world(two_ranks)["backend"] == "builtin"
    if entry.trains_model:
        single_process = run_experiment(entry.name, *settings, *entry.make_rank_settings(1), runs=tmp_path / "one")
        check_equal_losses(two_ranks, single_process)


TRANSPORT_SETTINGS = {
    "memory": ("launch.backend=builtin",),
    "two_level": ("launch.backend=builtin", "launch.nodes=2", "launch.algorithm=two_level"),
    "tls": (*BUILTIN, "launch.tls=true"),
}
FSDP = {"ddp_multinode": ("strategy=fsdp",)}  # all other tests use DDP
OVER_TRANSPORTS: list[tuple[Entry, str]] = []
for experiment in ENTRIES:
    OVER_TRANSPORTS += [(experiment, transport) for transport in experiment.parity_transports]


def make_id(parameter: Entry | str) -> str:
    return parameter.name if isinstance(parameter, Entry) else parameter


@pytest.mark.parametrize(("entry", "transport"), draw_cases("transports", OVER_TRANSPORTS, 5), ids=make_id)
def test_an_experiment_over_a_transport_equals_one_process(
    entry: Entry, transport: str, tmp_path: Path, quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Pairs that no other test of this file covers."""
    settings = (*quick, *EXACT, *FSDP.get(entry.name, ()))
    spread = entry.make_rank_settings(2)
    if transport == "two_level":  # two hosts with one rank each
        spread = tuple(setting.replace("processes_per_node=2", "processes_per_node=1") for setting in spread)
    single_process = run_experiment_once(
        tmp_path_factory, f"one-process-{entry.name}", entry.name, *settings, *entry.make_rank_settings(1)
    )
    two_ranks = run_experiment(entry.name, *settings, *spread, *TRANSPORT_SETTINGS[transport], runs=tmp_path)
    check_equal_losses(two_ranks, single_process)
    world = read_world(two_ranks)
    assert world["backend"] == "builtin"
    assert world["tls"] == (transport == "tls")


def test_messages_of_pipelines_equal_the_unsplit_model(tmp_path: Path, cache: Path) -> None:
    """Both engines, with one and two stages per rank."""
    cases = [
        f"engine=own,schedule=1f1b,stages=2,microbatches=6,{WIRE}",
        f"engine=torch,schedule=1f1b,stages=2,microbatches=6,{WIRE}",
        f"engine=own,schedule=gpipe,stages=4,stages_per_process=2,microbatches=4,{WIRE}",
    ]
    outcomes = train_cases(PIPELINE, tmp_path, cache, 2, cases)
    assert list(outcomes) == cases
    reference_run = run_reference(PIPELINE, cache, "stages=1")
    for case, outcome in outcomes.items():
        assert list_differences(outcome, reference_run) == [], case


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_ddp_and_fsdp_equal_one_process(transport: str, tmp_path: Path, cache: Path) -> None:
    settings = f"launch.backend=builtin,launch.transport={transport}"
    cases = [f"strategy=fsdp,{settings}", f"find_unused_parameters=true,{settings}"]
    outcomes = train_cases(DDP, tmp_path, cache, 2, cases)
    reference_run = run_reference(DDP, cache, "model=convnet")
    for case in cases:
        assert list_differences(outcomes[case], reference_run) == [], case


def test_encrypted_ranks_equal_one(tmp_path: Path, quick: tuple[str, ...]) -> None:
    """Also ranks of simulated hosts, which do not share memory; no key is left."""
    settings = (*quick, *EXACT)
    tls = ("launch.backend=builtin", "launch.tls=true", "launch.algorithm=two_level", "launch.nodes=2")
    four_ranks = run_experiment("ddp_multinode", *settings, *tls, "processes_per_node=2", runs=tmp_path / "four")
    single_process = run_experiment("ddp_multinode", *settings, "processes_per_node=1", runs=tmp_path / "one")
    check_equal_losses(four_ranks, single_process)
    assert read_world(four_ranks)["tls"] is True
    for file in four_ranks.folder.path.rglob("*"):
        assert file.suffix != ".pem"
        assert ".private" not in file.name


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_and_its_hooks_equal_one_process(ranks: int) -> None:
    check_program("backend_calls", ranks, "auto", "ddp")
