"""The parameter server in runs: recorded pushes are replayed to the bit; staleness bounds, checkpoints and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
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
from common.data.loader import Loader
from common.data.prepare import prepare_dataset
from common.data.samples import Images
from common.models import networks
from common.runs.folder import MODEL_FILE, RunFolder, read_json
from common.system import seeds
from common.system.errors import UserError
from common.techniques.parameter_server.server import replay_recorded_steps
from configs.param_server import Config
from tests.harness.commands.processes import FinishedRun, Settings, run_experiment
from tests.harness.elastic.faulty_runs import list_world_changes, train_and_compare, train_on_one_rank
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.runs.resuming import copy_as_interrupted, list_trained_steps, resume_run

WORKERS = 3
SERVERS = 2
STEPS = 30
SAVED_STEP = 12
SPREAD = (f"processes_per_node={WORKERS}", f"servers={SERVERS}")
Logs = list[list[dict[str, Any]]]


@pytest.fixture
def recorded(quick: Settings, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """An asynchronous run whose servers recorded their events."""
    settings = ("mode=async", "model=mlp", "record=true", "compare=true")
    return run_experiment_once(tmp_path_factory, "async", "param_server", *quick, *SPREAD, *settings)


def read_logs(folder: RunFolder, attempt: int = 0) -> Logs:
    """Return the events that each server of an attempt recorded."""
    attempt_folder = folder.list_attempts()[attempt].attempt_folder
    files = [attempt_folder / f"served-{rank}.json" for rank in range(SERVERS)]
    return [read_json(file)["events"] for file in files]


def list_tickets(log: list[dict[str, Any]]) -> list[int]:
    """Return the tickets of all pushes, in the order in which they were applied."""
    tickets: list[int] = []
    for event in log:
        tickets += event.get("push", ())
    return tickets


def compute_push_staleness(log: list[dict[str, Any]]) -> list[int]:
    """Return the staleness of each push to a server, ordered by ticket."""
    pulled_versions = {event["pull"]: event["version"] for event in log if "pull" in event}
    staleness: dict[int, int] = {}
    for event in log:
        for ticket in event.get("push", ()):
            staleness[ticket] = event["version"] - 1 - pulled_versions[ticket]
    return [staleness[ticket] for ticket in sorted(staleness)]


def average_over_shares(values: Sequence[float]) -> list[float]:
    """Return the mean over the shares of each step, from one value per ticket."""
    return [fmean(values[start : start + WORKERS]) for start in range(0, len(values), WORKERS)]


def replay_run(folder: RunFolder, logs: Logs) -> tuple[Tensor, list[float]]:
    """Repeat a run in this process from the records of its servers.

    Return the final parameters [n], and the mean loss of each share, ordered by ticket.
    """
    cfg = config.load_config(Config, [f"--config={folder.path / 'config.yaml'}"], {})
    prepared = prepare_dataset(cfg.data)
    images = Images(prepared, "train", cfg.data.train_limit)
    state_dicts.seed_global_rngs(seeds.derive_seed(cfg.seed, "init"))
    network = networks.build_network(cfg.model, images.shape, images.outputs)
    loader = Loader.from_config(images, cfg, torch.device("cpu"))
    batches: list[tuple[Tensor, Tensor]] = []
    for _ in range(cfg.epochs):
        batches += loader
    losses: dict[int, float] = {}

    def compute_gradient(ticket: int, parameters: Tensor) -> Tensor:
        vector_to_parameters(parameters, network.parameters())
        network.zero_grad()
        step, worker = divmod(ticket, WORKERS)
        x, y = (tensor.chunk(WORKERS)[worker] for tensor in batches[step])
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        losses[ticket] = loss.item()
        return parameters_to_vector(p.grad for p in network.parameters() if p.grad is not None)

    def build_shard_optimizer(shard: Any) -> torch.optim.Optimizer:
        return build_optimizer(shard, cfg.optim)

    initial = parameters_to_vector(network.parameters()).detach()
    parameters = replay_recorded_steps(logs, initial, build_shard_optimizer, WORKERS, compute_gradient)
    return parameters, [losses[ticket] for ticket in sorted(losses)]


def flatten_mlp(state: dict[str, Tensor]) -> Tensor:
    """Flatten the parameters of a model, in the order of the network."""
    network = networks.build_network("mlp", (28, 28), 10)
    return torch.cat([state[name].flatten() for name, _ in network.named_parameters()])


def test_recorded_pushes_are_replayed_to_the_bit(recorded: FinishedRun) -> None:
    folder = recorded.folder
    logs = read_logs(folder)
    for log in logs:
        assert sorted(list_tickets(log)) == list(range(WORKERS * STEPS)), "every shard of the data once"
        versions = [event["version"] for event in log if "push" in event]
        assert versions == list(range(1, WORKERS * STEPS + 1))
    parameters, share_losses = replay_run(folder, logs)
    assert torch.equal(parameters, flatten_mlp(load_file(folder.path / MODEL_FILE)))
    assert recorded.losses == pytest.approx(average_over_shares(share_losses), rel=1e-5)


def test_the_logged_staleness_is_the_mean_over_the_shares_of_a_step(recorded: FinishedRun) -> None:
    """A worker may process any number of the shares of a step, and each push has the maximum over the servers."""
    staleness = list(map(max, *map(compute_push_staleness, read_logs(recorded.folder))))
    logged = [row["staleness"] for row in recorded.folder.read_metrics() if "staleness" in row]
    assert logged == pytest.approx(average_over_shares(staleness))


def test_a_checkpoint_contains_exactly_the_pushes_of_its_steps(recorded: FinishedRun) -> None:
    folder = recorded.folder
    count = WORKERS * SAVED_STEP
    logs_until_save = Logs()
    for log in read_logs(folder):
        assert sorted(list_tickets(log)[:count]) == list(range(count)), "ranks save after all pushes are applied"
        event_count = 0
        for number, event in enumerate(log, start=1):
            if any(ticket < count for ticket in event.get("push", ())):
                event_count = number
        logs_until_save.append(log[:event_count])
    checkpoints = {checkpoint.step: checkpoint for checkpoint in storage.list_checkpoints(folder.list_attempts()[0])}
    saved = read_full_model(checkpoints[SAVED_STEP])
    parameters, _ = replay_run(folder, logs_until_save)
    assert torch.equal(parameters, flatten_mlp(saved))


@pytest.mark.slow
def test_an_asynchronous_run_is_resumed_from_a_checkpoint(recorded: FinishedRun, tmp_path: Path) -> None:
    folder = copy_as_interrupted(recorded.folder, SAVED_STEP, tmp_path)
    completed = resume_run(ENTRY_BY_NAME["param_server"], folder)
    assert f"resumed from step {SAVED_STEP}" in completed.stdout
    assert list_trained_steps(folder) == list(range(1, STEPS + 1))
    for log in read_logs(folder, attempt=1):
        assert sorted(list_tickets(log)) == list(range(WORKERS * SAVED_STEP, WORKERS * STEPS))
    assert folder.result["measured"]["pushes"] == [WORKERS * (STEPS - SAVED_STEP)] * SERVERS


@pytest.mark.parametrize("bound", [0, 1])
def test_the_staleness_stays_within_its_bound(bound: int, quick: Settings, tmp_path: Path) -> None:
    settings = ("mode=bounded", f"staleness={bound}", "model=mlp", "plot=false")
    completed = run_experiment("param_server", *quick, *SPREAD, *settings, runs=tmp_path)
    assert completed.result["staleness_most"] <= bound
    assert completed.result["pushes"] == [WORKERS * STEPS] * SERVERS
    for row in completed.folder.read_metrics():
        assert row.get("staleness", 0) <= bound


def test_the_report_contains_pushes_bytes_and_staleness(recorded: FinishedRun) -> None:
    network = networks.build_network("mlp", (28, 28), 10)
    size = sum(parameter.numel() for parameter in network.parameters())
    shard_sizes = [size // 2, size - size // 2]
    expected_bytes = [WORKERS * STEPS * 4 * shard_size for shard_size in shard_sizes]
    result = recorded.result
    assert result["bytes_received"] == expected_bytes
    assert result["bytes_sent_by_servers"] == expected_bytes
    assert sum(result["staleness_counts"].values()) == SERVERS * WORKERS * STEPS
    assert sum(result["pushes"]) == SERVERS * WORKERS * STEPS
    assert "3 workers, 2 servers" in recorded.stdout
    assert "90 gradients" in recorded.stdout
    assert (recorded.folder.path / "staleness.png").exists()
    assert f"with DDP       {result['ddp_samples_per_second']:,.0f} samples/s" in recorded.stdout


@pytest.mark.slow
def test_losses_equal_those_of_one_process_after_a_worker_is_killed(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (f"data.cache={cache}", "plot=false")
    elastic = (*SPREAD, "elastic=true", "elastic.rejoin=0")
    single = train_on_one_rank(tmp_path_factory, *settings, name="param_server")
    runs = tmp_path / "runs"
    folder = train_and_compare(single, "push:2:7:kill", *settings, *elastic, runs=runs, name="param_server")
    assert list_world_changes(folder) == [([2], [])]


def test_the_norm_of_one_worker_is_not_logged_as_the_mean() -> None:
    arguments = ["processes_per_node=4", "elastic=true", "log.gradient_norm=true"]
    with pytest.raises(UserError, match=r"cannot log the mean gradient norm .*; omit log.gradient_norm or set clip"):
        config.load_config(Config, arguments, {})
    config.load_config(Config, [*arguments, "clip=1"], {})
