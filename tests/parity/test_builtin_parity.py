"""With the backend `builtin` every experiment equals one process, in float64, to 1e-9; and so do messages and FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.runs.folder import read_json
from tests.harness import ddp_parity, parity, warm
from tests.harness.cases import train_cases
from tests.harness.processes import environment, run
from tests.harness.reference import TOLERANCE, differences
from tests.harness.registry import EXPERIMENTS, Entry
from tests.harness.resuming import ALONE
from tests.harness.shared import run_once

STEPS = 5
BUILTIN = ("launch.backend=builtin", "launch.transport=network")
WIRE = ",".join((*BUILTIN, "transport=network"))


@pytest.mark.parametrize("entry", EXPERIMENTS, ids=lambda entry: entry.name)
def test_two_ranks_equal_one(entry: Entry, tmp_path: Path, quick: tuple[str, ...]) -> None:
    """A pure measurement compares what it measures with arithmetic itself."""
    small = ("model=mlp",) if entry.name == "amp_accum" else ()  # BatchNorm sees other shards
    settings = (*quick, "dtype=float64", "checkpoint.every_steps=0", ALONE, f"steps={STEPS}", *small)
    two = run(entry.name, *settings, *entry.spread(2), *BUILTIN, runs=tmp_path / "two")
    assert two.status == 0, two.err
    assert read_json(two.folder.list_attempts()[0].attempt_folder / "world.json")["backend"] == "builtin"
    if entry.trains:
        one = run(entry.name, *settings, *entry.spread(1), runs=tmp_path / "one")
        assert one.status == 0, one.err
        assert two.losses == pytest.approx(one.losses, abs=TOLERANCE, rel=0)
        assert len(two.losses) == STEPS


OVER = {
    "memory": ("launch.backend=builtin",),
    "two_level": ("launch.backend=builtin", "launch.nodes=2", "launch.algorithm=two_level"),
    "tls": (*BUILTIN, "launch.tls=true"),
}
FSDP = {"ddp_multinode": ("strategy=fsdp",)}  # DDP is in all other tests
OVER_TRANSPORTS = [(entry, over) for entry in EXPERIMENTS for over in entry.transports]


@pytest.mark.parametrize(
    ("entry", "over"), OVER_TRANSPORTS, ids=[f"{entry.name}-{over}" for entry, over in OVER_TRANSPORTS]
)
def test_an_experiment_over_a_transport_equals_one_process(
    entry: Entry, over: str, tmp_path: Path, quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Pairs that other tests of this file leave out."""
    settings = (*quick, "dtype=float64", "checkpoint.every_steps=0", ALONE, f"steps={STEPS}", *FSDP.get(entry.name, ()))
    spread = entry.spread(2)
    if over == "two_level":  # of hosts with one rank each
        spread = tuple(word.replace("processes_per_node=2", "processes_per_node=1") for word in spread)
    one = run_once(tmp_path_factory, f"one-process-{entry.name}", entry.name, *settings, *entry.spread(1))
    found = run(entry.name, *settings, *spread, *OVER[over], runs=tmp_path)
    assert found.status == 0, found.err
    assert one.status == 0, one.err
    world = read_json(found.folder.list_attempts()[0].attempt_folder / "world.json")
    assert world["backend"] == "builtin"
    assert world["tls"] == (over == "tls")
    assert found.losses == pytest.approx(one.losses, abs=TOLERANCE, rel=0)
    assert len(found.losses) == STEPS


def test_messages_of_pipelines_equal_the_unsplit_model(tmp_path: Path, cache: Path) -> None:
    """Of either engine, one and two stages a rank."""
    name = "mnist_pipeline"
    cases = [f"engine={engine},schedule=1f1b,stages=2,microbatches=6,{WIRE}" for engine in ("own", "torch")]
    cases += [f"engine=own,schedule=gpipe,stages=4,stages_per_process=2,microbatches=4,{WIRE}"]
    trained = train_cases("parity", tmp_path, cache, 2, cases, name)
    expected = parity.expected(cache, name, "stages=1")
    differing = {case: differences(result, expected) for case, result in trained.items()}
    assert not {case: found for case, found in differing.items() if found}
    assert list(trained) == cases


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_ddp_and_fsdp_equal_one_process(transport: str, tmp_path: Path, cache: Path) -> None:
    settings = f"launch.backend=builtin,launch.transport={transport}"
    cases = [f"strategy=fsdp,{settings}", f"find_unused_parameters=true,{settings}"]
    trained = train_cases("ddp_parity", tmp_path, cache, 2, cases)
    expected = ddp_parity.expected(cache, "model=convnet")
    found = {case: ddp_parity.wrong(trained[case], expected) for case in cases}
    assert not {case: differing for case, differing in found.items() if differing}


def test_encrypted_ranks_equal_one(tmp_path: Path, quick: tuple[str, ...]) -> None:
    """Also those of simulated hosts, between which memory is not used; no key is left."""
    settings = (*quick, "dtype=float64", "checkpoint.every_steps=0", ALONE, f"steps={STEPS}")
    tls = ("launch.backend=builtin", "launch.tls=true", "launch.algorithm=two_level", "launch.nodes=2")
    four = run("ddp_multinode", *settings, *tls, "processes_per_node=2", runs=tmp_path / "four")
    one = run("ddp_multinode", *settings, "processes_per_node=1", runs=tmp_path / "one")
    assert four.status == 0, four.err
    assert one.status == 0, one.err
    assert four.losses == pytest.approx(one.losses, abs=TOLERANCE, rel=0)
    assert len(four.losses) == STEPS
    attempt = four.folder.list_attempts()[0].attempt_folder
    assert read_json(attempt / "world.json")["tls"] is True
    assert not [file for file in four.folder.path.rglob("*") if file.suffix == ".pem" or ".private" in file.name]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_and_its_hooks_equal_one_process(ranks: int) -> None:
    argv = [sys.executable, "-m", "tests.harness.backend_calls", str(ranks), "auto", "ddp"]
    completed = warm.execute(argv, env=environment())
    assert completed.returncode == 0, completed.stderr
