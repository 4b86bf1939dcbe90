"""The rules of a parameter server: when a pull is answered, and when a push is applied."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

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
from common.training.optimizers import SGD
from configs.param_server import Config
from tests.benchmarks.param_server_bound import compute_bound, play_turns
from tests.harness.chance import open_stream
from tests.harness.processes import wait_until

sgd = partial(SGD, lr=1.0)


def serve(policy: StalenessPolicy, timeout: float = 60, *, damp: bool = False) -> ShardServer:
    return ShardServer(Shard(torch.zeros(2), sgd, policy.workers), policy, timeout, damp=damp, record=True)


@pytest.mark.parametrize(("length", "servers"), [(10, 1), (10, 3), (3, 3), (7, 4)])
def test_shards_cover_the_vector_and_differ_by_one_at_most(length: int, servers: int) -> None:
    parts = split_vector_into_shards(length, servers)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(length))
    sizes = [part.stop - part.start for part in parts]
    assert len(sizes) == servers and max(sizes) - min(sizes) <= 1


def test_more_servers_than_parameters_are_refused() -> None:
    with pytest.raises(UserError, match="servers=4: the model has only 3 parameters; use fewer servers"):
        split_vector_into_shards(3, 4)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["staleness=-1"], ["staleness=-1: out of range; allowed: int >= 0"]),
        (["staleness=3"], ["staleness=3 needs mode=bounded"]),
        (["mode=async", "staleness=3"], ["staleness=3 needs mode=bounded; set mode=bounded or use staleness=0"]),
        (["damp=true"], ["damp=true has no effect with mode=sync, because no push is stale", "mode=async"]),
        (["servers=3"], ["servers=3", "exceeds the 2 ranks", "at most servers=2"]),
        (["servers=4", "processes_per_node=3"], ["servers=4", "exceeds the 3 ranks", "at most servers=3"]),
        (["servers=0"], ["servers=0: out of range"]),
        (["launch.device=cuda"], ["launch.device=cuda", "use launch.device=cpu"]),
        (["launch.device=auto"], ["launch.device=auto", "use launch.device=cpu"]),
        (["batch=63"], ["batch=63", "2 ranks", "batch=62 or 64"]),
        (["elastic=true", "mode=async"], ["which mode=async does not provide", "use mode=sync or omit elastic"]),
        (["elastic=true", "mode=bounded", "staleness=2"], ["mode=bounded", "use mode=sync"]),
        (["elastic=true", "servers=2"], ["servers=2 makes every rank a server", "use fewer servers or more ranks"]),
        (["elastic=true", "record=true"], ["record=true needs the same workers", "omit record or elastic"]),
        (["elastic=true", "compare=true"], ["compare=true needs the same workers"]),
        (["elastic=true", "elastic.min=3"], ["elastic.min=3", "exceeds the 2 ranks", "use at most elastic.min=2"]),
        (["elastic.mni=3"], ["unknown key elastic.mni", "did you mean elastic.min?"]),
    ],
)
def test_settings_of_the_parameter_server_that_do_not_fit_are_refused(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load_config(Config, words, {})
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 7])
def test_no_push_becomes_staler_than_its_bound_and_somebody_always_goes_on(workers: int, staleness: int) -> None:
    """Workers that compute for times drawn at random, against a server that keeps to the policy."""
    draw = open_stream(f"bounded-{workers}-{staleness}")
    policy, version, applied, most = StalenessPolicy("bounded", staleness, workers), 0, 0, 0
    pulled: dict[int, int] = {}
    held: list[int] = []
    while applied < 300:
        resting = [worker for worker in range(workers) if worker not in pulled]
        asking = [worker for worker in resting if policy.admits_pull(pulled.values(), version)]
        computing = [worker for worker in pulled if worker not in held]
        assert asking or computing, "nobody can go on"
        most = max(most, len(pulled))
        worker = draw.choice(asking + computing)
        if worker in asking:
            pulled[worker] = version
            continue
        held.append(worker)
        while chosen := policy.choose_pushes(held, pulled, version):
            (done,) = chosen
            held.remove(done)
            assert version - pulled.pop(done) <= staleness
            version, applied = version + 1, applied + 1
    assert most == min(workers, staleness + 1), "as many compute at a time as the bound allows"


def test_a_synchronous_server_applies_the_mean_of_all_pushes_once_all_are_there() -> None:
    server, found = serve(StalenessPolicy("sync", 0, 2)), dict[int, tuple[int, int]]()
    for worker in (0, 1):
        assert server.pull(worker, worker, 0.5).tolist() == [0, 0]
    waiting = threading.Thread(target=lambda: found.update({1: server.push(1, torch.tensor([2.0, 0]))}))
    waiting.start()
    wait_until(lambda: 1 in server.waiting_pushes, "the first push has come")
    assert server.shard.version == 0
    server.next_ticket = 2
    found[0] = server.push(0, torch.tensor([0.0, 4]))
    waiting.join()
    assert server.shard.version == 0, "until it is told that all servers have all pushes"
    server.apply_prepared_step()
    server.apply_prepared_step()
    assert server.shard.values.tolist() == [-0.5, -1] and server.shard.version == 1
    assert found == {0: (2, 0), 1: (3, 0)}
    assert server.events[-1] == {"push": [0, 1], "rate": 0.5, "version": 1}


@pytest.mark.parametrize(("damp", "expected"), [(False, -1.5), (True, -1.25)])
def test_an_asynchronous_server_applies_pushes_as_they_come(damp: bool, expected: float) -> None:
    server = serve(StalenessPolicy("async", 0, 2), damp=damp)
    for worker in (0, 1):
        server.pull(worker, worker, 1.0)
    assert server.push(1, torch.ones(2))[1] == 0
    server.pull(1, 2, 1.0)
    assert server.push(1, torch.ones(2))[1] == 0
    assert server.push(0, torch.ones(2))[1] == 2, "two versions were made since its pull"
    assert server.shard.values.tolist() == [expected] * 2 and server.staleness == {0: 2, 2: 1}


def test_waiting_ends_when_a_worker_is_lost_or_takes_too_long() -> None:
    server = serve(StalenessPolicy("sync", 0, 2), timeout=0.05)
    server.pull(0, 0, 1.0)
    with pytest.raises(TimeoutError, match="timed out"):
        server.push(0, torch.ones(2))
    server.abort_waiting_calls(RuntimeError("Connection closed"))
    with pytest.raises(RuntimeError, match="a worker has been lost: Connection closed"):
        server.push(0, torch.ones(2))


def test_pulls_that_wait_are_answered_in_the_order_in_which_they_came() -> None:
    """Whoever is quickest to ask again, such as the worker on the server's own rank, comes last."""
    for _ in range(20):
        server = serve(StalenessPolicy("bounded", 0, 3))
        server.pull(0, 0, 1.0)
        threads = [threading.Thread(target=take_turn, args=(server, worker)) for worker in (2, 1)]
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda server=server, number=number: len(server.pull_queue) > number, "it asks", pause=0.001)  # type: ignore[misc]
        server.push(0, torch.ones(2))
        server.pull(0, 3, 1.0)
        for thread in threads:
            thread.join()
        assert [event["pull"] for event in server.events if "pull" in event] == [0, 2, 1, 3]


def take_turn(server: ShardServer, worker: int) -> None:
    server.pull(worker, worker, 1.0)
    server.push(worker, torch.ones(2))


def test_a_log_is_replayed_with_the_versions_that_were_pulled_and_a_gap_is_noticed() -> None:
    first: list[dict[str, Any]] = [{"pull": 0}, {"pull": 1}, {"push": [1], "rate": 1.0}, {"push": [0], "rate": 0.5}]
    second: list[dict[str, Any]] = [{"pull": 0}, {"push": [0], "rate": 0.5}, {"pull": 1}, {"push": [1], "rate": 1.0}]
    seen: dict[int, list[float]] = {}

    def compute(ticket: int, values: Tensor) -> Tensor:
        seen[ticket] = values.tolist()
        return torch.tensor([1.0, 2.0]) * (ticket + 1)

    found = replay_recorded_steps([first, second], torch.tensor([10.0, 10.0]), sgd, 1, compute)
    assert seen == {0: [10, 10], 1: [10, 9]}, "of the second shard ticket 1 has pulled a newer version"
    assert found.tolist() == [10 - 2 - 0.5, 10 - 1 - 4]
    with pytest.raises(ValueError, match="an event is missing"):
        replay_recorded_steps([first, second[1:]], torch.zeros(2), sgd, 1, compute)


def test_the_report_counts_the_pushes_of_all_servers() -> None:
    served = [ServerCounts(4, 400, 400, {"0": 1, "1": 3}), ServerCounts(4, 400, 400, {"1": 2, "5": 2})]
    report = ServerReport(StalenessPolicy("bounded", 5, 3), served)
    assert report.compute_staleness_shares() == {0: 1 / 8, 1: 5 / 8, 2: 0, 3: 0, 4: 0, 5: 2 / 8}
    assert report.mean_staleness == pytest.approx(15 / 8)
    rows = report.rows()
    assert rows["mode"] == "bounded with a staleness of at most 5, 3 workers, 2 servers"
    assert rows["staleness"] == "mean 1.88, maximum 5  (0: 12%  1: 62%  5: 25%)"
    assert report.result().measured["staleness_counts"] == {"0": 1, "1": 5, "5": 2}


# ---- how many pushes that are at most


@pytest.mark.parametrize("turns", [(1.0, 1.0, 1.0, 10.0), (3.0, 1.0), (0.5, 0.7, 2.0), (2.0,)])
def test_turns_that_are_played_in_theory_take_what_the_formulas_say(turns: tuple[float, ...]) -> None:
    workers, alone = len(turns), sum(1 / turn for turn in turns)
    for policy, rate in (
        (StalenessPolicy("sync", 0, workers), workers / max(turns)),
        (StalenessPolicy("async", 0, workers), alone),
        (StalenessPolicy("bounded", 0, workers), workers / sum(turns)),
        (StalenessPolicy("bounded", 1000, workers), alone),
    ):
        assert play_turns(policy, turns) == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize(("staleness", "pushes"), [(3, 7), (5, 9), (8, 12), (12, 16)])
def test_between_two_pushes_of_a_slow_worker_its_bound_and_what_waits_for_it_are_applied(
    staleness: int, pushes: int
) -> None:
    assert play_turns(StalenessPolicy("bounded", staleness, 4), (0.1, 0.1, 0.1, 10)) == pytest.approx(
        pushes / 10, rel=0.02
    )


def test_no_mode_makes_more_pushes_than_without_a_slow_cable_or_than_the_others_and_the_cable() -> None:
    compute = partial(compute_bound, free=100, others=100)
    alone = StalenessPolicy("async", 0, 4)
    assert compute(alone, carrying=0.1, processors=4) == pytest.approx(75 + 1 / 0.14, rel=0.02)
    assert compute(alone, carrying=0.1, processors=2) == 100
    assert compute(alone, others=80, carrying=0.1, processors=2) == pytest.approx(80 + 1 / 0.12)
    assert compute(StalenessPolicy("sync", 0, 4), carrying=0.18, processors=2) == pytest.approx(20)
