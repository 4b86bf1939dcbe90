"""Replicas of a pipeline: layout of ranks, settings, BatchNorm statistics, and a model too large for one process."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.train_state import TrainState
from common.config import config
from common.data import loader as data
from common.data import prepare
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.system.errors import UserError
from common.techniques.pipeline.mesh import create_mesh_groups
from configs.resnet_modelparallel import Config
from configs.shared import Data
from tests.harness.commands.processes import run_experiment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.environment.prepared_images import load_train_test


class FakeWorld(SimpleNamespace):
    """A world of six ranks, with the host of each."""

    def make_subgroup(self, members: Sequence[int]) -> Any:
        return SimpleNamespace(global_ranks=[*members], hosts=[self.hosts[member] for member in members])


def create_groups(rank: int, hosts: str) -> tuple[Any, Any]:
    """Create the groups of two replicas, as one of six ranks."""
    world: Any = FakeWorld(rank=rank, size=6, hosts=hosts)
    return create_mesh_groups(world, 2)


def test_the_stages_of_a_replica_share_a_host() -> None:
    groups = [create_groups(rank, "aaabbb") for rank in range(6)]
    for rank, (pipeline, replicas) in enumerate(groups):
        assert pipeline.global_ranks == ([0, 1, 2] if rank < 3 else [3, 4, 5])
        assert replicas.global_ranks == [rank % 3, rank % 3 + 3]


@pytest.mark.parametrize("hosts", ["ababab", "aaaabb"])
def test_a_replica_on_two_hosts_is_refused_by_all_ranks(hosts: str) -> None:
    message = "replicas=2: one replica has its stages on hosts a and b; start a multiple of 3"
    for rank in range(6):  # a rank that accepted the hosts would wait for the other ranks
        with pytest.raises(UserError, match=message):
            create_groups(rank, hosts)


MEANS_BY_LAYOUT = [
    ("first second", 2, [1.0, 2.0]),  # the saved layout: the statistics of this rank
    ("first second", 1, [30.0, 30.0]),  # no replica
    ("first second", 0, [30.0, 30.0]),
    ("first", 2, [30.0]),  # replicas of other stages
    ("second third", 2, [30.0, 30.0]),
    ("third", 0, [30.0]),
]


@pytest.mark.parametrize("layers, peers, means", MEANS_BY_LAYOUT)
def test_local_statistics_are_restored_only_if_the_layout_is_the_same(
    layers: str, peers: int, means: list[float], cache: Path
) -> None:
    settings = Data(name="digits", cache=str(cache))
    images, _ = load_train_test(prepare.prepare_dataset(settings), settings)
    cpu = torch.device("cpu")

    def build_state(names: str, peer_count: int) -> TrainState:
        stage = nn.Sequential(OrderedDict((name, nn.BatchNorm1d(1)) for name in names.split()))
        peers = None
        if peer_count:
            hosts = ("here",) * peer_count
            peers = Ranks(World(size=peer_count, hosts=hosts, device=cpu, backend="gloo", threads=1))
        loader = data.Loader(images, 8, 0, cpu, torch.float32)
        return TrainState([stage], torch.optim.SGD(stage.parameters()), loader, peers=peers)

    def list_means(state: TrainState) -> list[torch.Tensor]:
        return [buffer for name, buffer in state.buffers if name.endswith("mean")]

    saved = build_state("first second", 1)
    for number, mean in enumerate(list_means(saved)):
        mean.fill_(number + 1)
    averaged = dict(build_state("first second third", 0).collect_state().model)
    for name, tensor in averaged.items():
        if name.endswith("mean"):
            averaged[name] = torch.full_like(tensor, 30)
    collected = saved.collect_state()
    resumed = build_state(layers, peers)
    resumed.load(LoadedCheckpoint(5, 1, 4, averaged, {}, collected.common, collected.local))
    assert [mean.item() for mean in list_means(resumed)] == means


INVALID_SETTINGS = {
    "replicas=3": "batch=64 ... replicas=3 ... 1, 2, 4",
    "replicas=2 launch.nodes=4": "replicas=2 ... launch.nodes=4 ... multiple of launch.nodes",
    "replicas=2 split_size=64": "the 32 samples of a replica ... split_size=64",
    "replicas=2 devices=[cpu,cpu]": "needs a single process",
    "zero1=true": "no two ranks of this run hold the same parameters; use replicas=2 or more, or omit zero1",
}


@pytest.mark.parametrize("arguments, message", INVALID_SETTINGS.items())
def test_invalid_settings_of_replicas_are_refused(arguments: str, message: str) -> None:
    with expect_refusal(message):
        config.load_config(Config, arguments.split(), {})
    assert config.load_config(Config, ["replicas=4", "launch.nodes=2"], {}).processes == 8


@pytest.mark.slow
def test_a_model_too_large_for_one_process_trains_in_two(tmp_path: Path) -> None:
    """11 million parameters with gradients and Adam state take 180 MB, and a step needs more; half of them fit."""
    small = ("data.name=generated", "data.samples=50", "data.image_size=16", "batch=4", "steps=1", "plot=false")
    tight = (f"data.cache={tmp_path}", "optim.name=adam", "balance=parameters", "memory_cap=210", "launch.threads=1")
    single = run_experiment("resnet_modelparallel", *small, *tight, "mode=single", runs=tmp_path / "one", status=2)
    assert single.folder.result["cause"] == "out_of_memory"
    (message,) = [line for line in single.stderr.splitlines() if "error" in line]
    for part in ("memory_cap=210", "does not fit into 210 MB", "stages="):
        assert part in message

    split = run_experiment("resnet_modelparallel", *small, *tight, "mode=pipelined", "stages=2", runs=tmp_path / "two")
    assert len(split.losses) == 1
    assert 0.4 * 180e6 < split.result["training_bytes"] < 210e6
    assert min(split.result["memory"].values()) > 210e6
    number = r"rank 0: [\d.]+ MB  rank 1: [\d.]+ MB  of "
    assert re.search(rf"peak memory +{number}the whole process, libraries included", split.stdout), split.stdout
    assert re.search(rf"training memory +{number}writable .*; the limit is memory_cap=210", split.stdout), split.stdout
