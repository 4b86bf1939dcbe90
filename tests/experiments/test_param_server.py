"""The parameter server in runs: what was served is replayed to the bit, and bounds, saved states and plots hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common.api import build_optimizer
from common.checkpoint import state_dicts, storage
from common.checkpoint.rank_file import read_full_model
from common.config import config
from common.data.loader import Images, Loader
from common.data.prepare import prepare_dataset
from common.models import networks
from common.runs.folder import MODEL_FILE, RunFolder
from common.system import seeds
from common.techniques.parameter_server.server import replay_recorded_steps
from configs.param_server import Config
from tests.harness.elastic_runs import list_changes, train_alone, train_like
from tests.harness.processes import Done, run
from tests.harness.registry import BY_NAME
from tests.harness.resuming import cut_off, resume, trained_steps
from tests.harness.shared import run_once

WORKERS, SERVERS, STEPS, SAVED = 3, 2, 30, 12
Logs = list[list[dict[str, Any]]]


@pytest.fixture
def recorded(quick: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Done:
    """An asynchronous run with a record of what was served."""
    spread = (f"processes_per_node={WORKERS}", f"servers={SERVERS}")
    words = (*spread, "mode=async", "model=mlp", "record=true", "compare=true")
    return run_once(tmp_path_factory, "async", "param_server", *quick, *words)


def read_logs(folder: RunFolder, attempt: int = 0) -> Logs:
    """What each server of an attempt has served."""
    files = [folder.list_attempts()[attempt].attempt_folder / f"served-{rank}.json" for rank in range(SERVERS)]
    return [json.loads(file.read_text())["events"] for file in files]


def tickets_of(log: list[dict[str, Any]]) -> list[int]:
    """The tickets of all pushes, in the order in which they were applied."""
    return [ticket for event in log for ticket in event.get("push", ())]


def replay_run(folder: RunFolder, logs: Logs) -> Tensor:
    """Repeat a run in this process from what its servers have served; the parameters [n] at the end."""
    cfg = config.load_config(Config, [f"--config={folder.path / 'config.yaml'}"], {})
    prepared = prepare_dataset(cfg.data)
    images = Images(prepared, "train", cfg.data.train_limit)
    state_dicts.seed_global_rngs(seeds.derive_seed(cfg.seed, "init"))
    network = networks.build_network(cfg.model, images.shape, images.class_count)
    loader = Loader.from_config(images, cfg, torch.device("cpu"))
    batches = [batch for _ in range(cfg.epochs) for batch in loader]

    def compute(ticket: int, values: Tensor) -> Tensor:
        vector_to_parameters(values, network.parameters())
        network.zero_grad()
        x, y = (part.chunk(WORKERS)[ticket % WORKERS] for part in batches[ticket // WORKERS])
        F.cross_entropy(network(x), y).backward()
        return parameters_to_vector(p.grad for p in network.parameters() if p.grad is not None)

    values = parameters_to_vector(network.parameters()).detach()
    return replay_recorded_steps(logs, values, lambda shard: build_optimizer(shard, cfg.optim), WORKERS, compute)


def flatten(folder: RunFolder, state: dict[str, Tensor]) -> Tensor:
    """The parameters of a model, in the order of the network's."""
    network = networks.build_network("mlp", (28, 28), 10)
    return torch.cat([state[name].flatten() for name, _ in network.named_parameters()])


def test_what_was_served_is_replayed_to_the_bit(recorded: Done) -> None:
    assert recorded.status == 0, recorded.err
    folder, logs = recorded.folder, read_logs(recorded.folder)
    for log in logs:
        assert sorted(tickets_of(log)) == list(range(WORKERS * STEPS)), "every shard of the data once"
        versions = [event["version"] for event in log if "push" in event]
        assert versions == list(range(1, WORKERS * STEPS + 1))
    assert torch.equal(replay_run(folder, logs), flatten(folder, load_file(folder.path / MODEL_FILE)))


def test_a_saved_state_has_all_pushes_of_its_steps_and_no_other(recorded: Done) -> None:
    folder, count, begun = recorded.folder, WORKERS * SAVED, Logs()
    for log in read_logs(folder):
        tickets = tickets_of(log)
        assert sorted(tickets[:count]) == list(range(count)), "where all ranks meet, all pushes are applied"
        last = max(place for place, event in enumerate(log) if set(event.get("push", ())) & set(range(count)))
        begun.append(log[: last + 1])
    (saved,) = [found for found in storage.list_checkpoints(folder.list_attempts()[0]) if found.step == SAVED]
    assert torch.equal(replay_run(folder, begun), flatten(folder, read_full_model(saved)))


def test_an_asynchronous_run_goes_on_from_a_saved_state(recorded: Done, tmp_path: Path) -> None:
    folder = cut_off(recorded.folder, SAVED, tmp_path)
    done = resume(BY_NAME["param_server"], folder)
    assert done.returncode == 0 and f"resumed from step {SAVED}" in done.stdout, done.stderr
    assert trained_steps(folder) == list(range(1, STEPS + 1))
    for log in read_logs(folder, attempt=1):
        assert sorted(tickets_of(log)) == list(range(WORKERS * SAVED, WORKERS * STEPS))
    assert folder.result["measured"]["pushes"] == [WORKERS * (STEPS - SAVED)] * SERVERS


@pytest.mark.parametrize("bound", [0, 1])
def test_a_bound_on_the_staleness_holds(bound: int, quick: tuple[str, ...], tmp_path: Path) -> None:
    words = (f"processes_per_node={WORKERS}", f"servers={SERVERS}", "mode=bounded", f"staleness={bound}", "model=mlp")
    done = run("param_server", *quick, *words, "plot=false", runs=tmp_path)
    assert done.status == 0, done.err
    assert done.result["staleness_most"] <= bound and done.result["pushes"] == [WORKERS * STEPS] * SERVERS
    assert all(row["staleness"] <= bound for row in done.folder.read_metrics() if "staleness" in row)


def test_the_report_tells_pushes_bytes_and_staleness(recorded: Done) -> None:
    size = sum(p.numel() for p in networks.build_network("mlp", (28, 28), 10).parameters())
    sent = [WORKERS * STEPS * 4 * (size * (rank + 1) // 2 - size * rank // 2) for rank in range(SERVERS)]
    result = recorded.result
    assert result["bytes_received"] == result["bytes_sent_by_servers"] == sent
    assert sum(result["staleness_counts"].values()) == sum(result["pushes"]) == SERVERS * WORKERS * STEPS
    assert "3 workers, 2 servers" in recorded.out and "90 gradients" in recorded.out
    assert (recorded.folder.path / "staleness.png").exists()
    assert f"with DDP       {result['ddp_samples_per_second']:,.0f} samples/s" in recorded.out


def test_the_losses_of_a_parameter_server_are_those_of_one_process_though_a_worker_is_killed(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words, name = (f"data.cache={cache}", "plot=false"), "param_server"
    more = ("processes_per_node=3", "servers=2", "elastic=true", "elastic.rejoin=0")
    alone = train_alone(tmp_path_factory, *words, name=name)
    folder = train_like(alone, "push:2:7:kill", *words, *more, runs=tmp_path / "runs", name=name)
    assert list_changes(folder) == [([2], [])]
