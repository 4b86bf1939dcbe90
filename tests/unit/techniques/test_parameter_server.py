"""The rules of a parameter server: when a pull is answered, and when a push is applied."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from common.config import config
from common.system.errors import UserError
from common.techniques.parameter_server.report import ServerCounts, ServerReport
from common.techniques.parameter_server.server import (
    Shard,
    ShardServer,
    StalenessPolicy,
    replay_recorded_steps,
    split_vector_into_shards,
)
from common.techniques.parameter_server.worker import ParameterServerRank
from common.training.optimizers import SGD
from configs.param_server import Config
from tests.benchmarks.param_server_bound import compute_bound, play_turns
from tests.harness.commands.processes import wait_until
from tests.harness.commands.refusals import expect_refusal
from tests.harness.environment.randomness import create_random

sgd = partial(SGD, lr=1.0)


def make_server(policy: StalenessPolicy, timeout: float = 60, *, damp: bool = False) -> ShardServer:
    """Return the server of two parameters that start at zero."""
    return ShardServer(Shard(torch.zeros(2), sgd, policy.workers), policy, timeout, damp=damp, record=True)


@pytest.mark.parametrize("length, servers", [(10, 1), (10, 3), (3, 3), (7, 4)])
def test_shards_cover_the_vector_and_their_sizes_differ_by_at_most_one(length: int, servers: int) -> None:
    shards = split_vector_into_shards(length, servers)
    indices: list[int] = []
    for shard in shards:
        indices += range(shard.start, shard.stop)
    assert indices == list(range(length))
    assert len(shards) == servers
    sizes = [shard.stop - shard.start for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_more_servers_than_parameters_are_refused() -> None:
    with pytest.raises(UserError, match="servers=4: the model has only 3 parameters; use fewer servers"):
        split_vector_into_shards(3, 4)


def test_a_frozen_parameter_is_refused() -> None:
    network = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1).requires_grad_(False))
    with pytest.raises(UserError, match=r"the parameter 1\.weight is frozen .*; register it as a buffer"):
        ParameterServerRank(network, cast(Any, None), sgd, servers=1, policy=StalenessPolicy("sync", 0, 2))


OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "weight decay": (partial(SGD, lr=1.0, weight_decay=0.5), 0.0),
    "adam": (partial(torch.optim.Adam, lr=1.0), 0.3),
    "adamw": (partial(torch.optim.AdamW, lr=1.0, weight_decay=0.5), 0.3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pushes_that_are_applied_one_by_one_change_as_much_as_one_step_with_all(name: str) -> None:
    make_optimizer, gradient = OPTIMIZERS[name]
    together, separate = (Shard(torch.ones(3), make_optimizer, 4) for _ in range(2))
    push = torch.full((3,), gradient)
    for _ in range(10):
        together.apply_gradients([push] * 4, 0.01)
        for _ in range(4):
            separate.apply_gradients([push], 0.01)
    assert (together.values < 0.97).all(), "the comparison needs steps that change the values"
    assert torch.allclose(separate.values, together.values, rtol=1e-2)


INVALID_SETTINGS = {
    "staleness=-1": "staleness=-1: out of range; allowed: int >= 0",
    "staleness=3": "staleness=3 needs mode=bounded",
    "mode=async staleness=3": "staleness=3 needs mode=bounded; set mode=bounded or use staleness=0",
    "damp=true": "damp=true has no effect with mode=sync, because no push is stale ... mode=async",
    "servers=3": "servers=3 ... exceeds the 2 ranks ... at most servers=2",
    "servers=4 processes_per_node=3": "servers=4 ... exceeds the 3 ranks ... at most servers=3",
    "servers=0": "servers=0: out of range",
    "launch.device=cuda": "launch.device=cuda ... use launch.device=cpu",
    "launch.device=auto": "launch.device=auto ... use launch.device=cpu",
    "batch=63": "batch=63 ... 2 ranks ... batch=62 or 64",
    "elastic=true mode=async": "which mode=async does not provide ... use mode=sync or omit elastic",
    "elastic=true mode=bounded staleness=2": "mode=bounded ... use mode=sync",
    "elastic=true servers=2": "servers=2 makes every rank a server ... use fewer servers or more ranks",
    "elastic=true record=true": "record=true needs the same workers ... omit record or elastic",
    "elastic=true compare=true": "compare=true needs the same workers",
    "elastic=true elastic.min=3": "elastic.min=3 ... exceeds the 2 ranks ... use at most elastic.min=2",
    "elastic.mni=3": "unknown key elastic.mni ... did you mean elastic.min?",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_of_the_parameter_server_are_refused(settings: str, message: str) -> None:
    with expect_refusal(message):
        config.load_config(Config, settings.split(), {})


class SimulatedWorkers:
    """Workers that compute for random times, and a server that follows the policy."""

    def __init__(self, policy: StalenessPolicy) -> None:
        self.policy = policy
        self.version = 0
        self.pulled_versions: dict[int, int] = {}
        """Version that each computing or waiting worker has pulled."""
        self.waiting_pushes: list[int] = []
        self.max_computing = 0
        self.max_staleness = 0

    def list_possible_pulls(self) -> list[int]:
        """Return the workers that may pull."""
        if not self.policy.admits_pull(self.pulled_versions.values(), self.version):
            return []
        return [worker for worker in range(self.policy.workers) if worker not in self.pulled_versions]

    def list_possible_pushes(self) -> list[int]:
        """Return the workers that compute and may push."""
        return [worker for worker in self.pulled_versions if worker not in self.waiting_pushes]

    def pull(self, worker: int) -> None:
        self.pulled_versions[worker] = self.version
        self.max_computing = max(self.max_computing, len(self.pulled_versions))

    def push(self, worker: int) -> None:
        """Add a push, and apply all pushes that the policy allows."""
        self.waiting_pushes.append(worker)
        while workers := self.policy.choose_pushes(self.waiting_pushes, self.pulled_versions, self.version):
            (applied,) = workers
            self.waiting_pushes.remove(applied)
            self.max_staleness = max(self.max_staleness, self.version - self.pulled_versions.pop(applied))
            self.version += 1


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 7])
def test_the_bound_limits_the_staleness_of_pushes_and_causes_no_deadlock(workers: int, staleness: int) -> None:
    random_choices = create_random(f"bounded-{workers}-{staleness}")
    simulation = SimulatedWorkers(StalenessPolicy("bounded", staleness, workers))
    while simulation.version < 300:
        pulls = simulation.list_possible_pulls()
        pushes = simulation.list_possible_pushes()
        assert pulls or pushes, "no worker can continue"
        worker = random_choices.choice(pulls + pushes)
        if worker in pulls:
            simulation.pull(worker)
        else:
            simulation.push(worker)
    assert simulation.max_staleness <= staleness
    assert simulation.max_computing == min(workers, staleness + 1), "as many workers compute as the bound allows"


def test_a_synchronous_server_applies_the_mean_of_all_pushes() -> None:
    server = make_server(StalenessPolicy("sync", 0, 2))
    answers: dict[int, tuple[int, int]] = {}
    for worker in (0, 1):
        assert server.pull(worker, worker, 0.5).tolist() == [0, 0]

    def push_as_worker_1() -> None:
        answers[1] = server.push(1, torch.tensor([2.0, 0]))

    waiting = threading.Thread(target=push_as_worker_1)
    waiting.start()
    wait_until(lambda: 1 in server.waiting_pushes, "the first push has arrived")
    assert server.shard.version == 0
    server.next_ticket = 2
    answers[0] = server.push(0, torch.tensor([0.0, 4]))
    waiting.join()
    assert server.shard.version == 0, "the step is applied when all servers have all pushes"

    server.apply_prepared_step()
    server.apply_prepared_step()
    assert server.shard.values.tolist() == [-0.5, -1]
    assert server.shard.version == 1
    assert answers == {0: (2, 0), 1: (3, 0)}
    assert server.events[-1] == {"push": [0, 1], "rate": 0.5, "version": 1}


@pytest.mark.parametrize("damp, parameter", [(False, -1.5), (True, -1.25)])
def test_an_asynchronous_server_applies_each_push_when_it_arrives(damp: bool, parameter: float) -> None:
    server = make_server(StalenessPolicy("async", 0, 2), damp=damp)
    gradient = torch.ones(2)
    for worker in (0, 1):
        server.pull(worker, worker, 1.0)
    assert server.push(1, gradient)[1] == 0
    server.pull(1, 2, 1.0)
    assert server.push(1, gradient)[1] == 0
    assert server.push(0, gradient)[1] == 2, "there are two versions since the pull"
    assert server.shard.values.tolist() == [parameter, parameter]
    assert server.staleness == {0: 2, 2: 1}


def test_waiting_ends_with_a_timeout_or_a_lost_worker() -> None:
    server = make_server(StalenessPolicy("sync", 0, 2), timeout=0.05)
    server.pull(0, 0, 1.0)
    with pytest.raises(TimeoutError, match="timed out"):
        server.push(0, torch.ones(2))
    server.abort_waiting_calls(RuntimeError("Connection closed"))
    with pytest.raises(RuntimeError, match="a worker has been lost: Connection closed"):
        server.push(0, torch.ones(2))


def start_turn(server: ShardServer, worker: int) -> threading.Thread:
    """Start a worker that pulls and pushes, and return its thread as soon as the pull waits."""

    def take_turn() -> None:
        server.pull(worker, worker, 1.0)
        server.push(worker, torch.ones(2))

    waiting_pulls = len(server.pull_queue)
    thread = threading.Thread(target=take_turn)
    thread.start()
    wait_until(lambda: len(server.pull_queue) > waiting_pulls, "the pull waits", pause=0.001)
    return thread


def test_waiting_pulls_are_answered_in_the_order_of_their_arrival() -> None:
    """A fast worker, such as that on the rank of the server, does not overtake the others when it pulls again."""
    for _ in range(20):
        server = make_server(StalenessPolicy("bounded", 0, 3))
        server.pull(0, 0, 1.0)
        threads = [start_turn(server, worker) for worker in (2, 1)]
        server.push(0, torch.ones(2))
        server.pull(0, 3, 1.0)
        for thread in threads:
            thread.join()
        assert [event["pull"] for event in server.events if "pull" in event] == [0, 2, 1, 3]


Log = list[dict[str, Any]]
FIRST_LOG: Log = [{"pull": 0}, {"pull": 1}, {"push": [1], "rate": 1.0}, {"push": [0], "rate": 0.5}]
SECOND_LOG: Log = [{"pull": 0}, {"push": [0], "rate": 0.5}, {"pull": 1}, {"push": [1], "rate": 1.0}]


def compute_gradient(ticket: int, parameters: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0]) * (ticket + 1)


def test_a_replay_computes_with_the_versions_that_were_pulled() -> None:
    pulled: dict[int, list[float]] = {}

    def record_and_compute(ticket: int, parameters: Tensor) -> Tensor:
        pulled[ticket] = parameters.tolist()
        return compute_gradient(ticket, parameters)

    parameters = replay_recorded_steps([FIRST_LOG, SECOND_LOG], torch.tensor([10.0, 10.0]), sgd, 1, record_and_compute)
    assert pulled == {0: [10, 10], 1: [10, 9]}, "ticket 1 has pulled a newer version of the second shard"
    assert parameters.tolist() == [10 - 2 - 0.5, 10 - 1 - 4]


def test_a_replay_detects_a_missing_event() -> None:
    with pytest.raises(ValueError, match="an event is missing"):
        replay_recorded_steps([FIRST_LOG, SECOND_LOG[1:]], torch.zeros(2), sgd, 1, compute_gradient)


def test_the_report_counts_the_pushes_of_all_servers() -> None:
    counts = [ServerCounts(4, 400, 400, {"0": 1, "1": 3}), ServerCounts(4, 400, 400, {"1": 2, "5": 2})]
    report = ServerReport(StalenessPolicy("bounded", 5, 3), counts)
    assert report.compute_staleness_shares() == {0: 1 / 8, 1: 5 / 8, 2: 0, 3: 0, 4: 0, 5: 2 / 8}
    assert report.mean_staleness == pytest.approx(15 / 8)
    rows = report.rows()
    assert rows["mode"] == "bounded with a staleness of at most 5, 3 workers, 2 servers"
    assert rows["staleness"] == "mean 1.88, maximum 5  (0: 12%  1: 62%  5: 25%)"
    assert report.result().measured["staleness_counts"] == {"0": 1, "1": 5, "5": 2}


# ---- bounds on the rate of pushes, by which benchmarks are judged


@pytest.mark.parametrize("turns", [(1.0, 1.0, 1.0, 10.0), (3.0, 1.0), (0.5, 0.7, 2.0), (2.0,)])
def test_the_rate_of_simulated_turns_agrees_with_the_formulas(turns: tuple[float, ...]) -> None:
    workers = len(turns)
    independent_rate = sum(1 / turn for turn in turns)
    rates = [
        (StalenessPolicy("sync", 0, workers), workers / max(turns)),
        (StalenessPolicy("async", 0, workers), independent_rate),
        (StalenessPolicy("bounded", 0, workers), workers / sum(turns)),
        (StalenessPolicy("bounded", 1000, workers), independent_rate),
    ]
    for policy, rate in rates:
        assert play_turns(policy, turns) == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("staleness, pushes", [(3, 7), (5, 9), (8, 12), (12, 16)])
def test_the_bound_limits_the_pushes_during_one_turn_of_a_slow_worker(staleness: int, pushes: int) -> None:
    """The pushes within the bound, and those that waited for the slow worker."""
    rate = play_turns(StalenessPolicy("bounded", staleness, 4), (0.1, 0.1, 0.1, 10))
    assert rate == pytest.approx(pushes / 10, rel=0.02)


def test_a_slow_cable_limits_the_rate_of_pushes() -> None:
    """No mode exceeds the rate without the cable, nor the sum of the rates of the other workers and of the cable."""
    compute = partial(compute_bound, free=100, without_slow=100)
    asynchronous = StalenessPolicy("async", 0, 4)
    assert compute(asynchronous, carrying=0.1, processors=4) == pytest.approx(75 + 1 / 0.14, rel=0.02)
    assert compute(asynchronous, carrying=0.1, processors=2) == 100
    assert compute(asynchronous, without_slow=80, carrying=0.1, processors=2) == pytest.approx(80 + 1 / 0.12)
    assert compute(StalenessPolicy("sync", 0, 4), carrying=0.18, processors=2) == pytest.approx(20)
