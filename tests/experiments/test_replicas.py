"""Replicas of a pipeline: which process is what, the settings that fit, BatchNorm's own statistics; and the model that
is too large for one process and trains in two."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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
from tests.harness.images import load_train_test
from tests.harness.processes import run


def test_stages_share_a_host_and_replicas_have_one_each() -> None:
    class Somewhere(SimpleNamespace):
        """A process of six, with the host of each."""

        def make_subgroup(self, members: Sequence[int]) -> Any:
            return SimpleNamespace(global_ranks=[*members], hosts=[self.hosts[member] for member in members])

    blocks = [create_mesh_groups(cast(Any, Somewhere(rank=rank, size=6, hosts="aaabbb")), 2) for rank in range(6)]
    assert [cast(Any, pp).global_ranks for pp, _ in blocks] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert [cast(Any, dp).global_ranks for _, dp in blocks] == [[0, 3], [1, 4], [2, 5]] * 2
    for rank, hosts in itertools.product(range(6), ("ababab", "aaaabb")):  # all say it: none waits for the others
        with pytest.raises(
            UserError, match="replicas=2: one replica has its stages on hosts a and b; start a multiple of 3"
        ):
            create_mesh_groups(cast(Any, Somewhere(rank=rank, size=6, hosts=hosts)), 2)


@pytest.mark.parametrize(
    ("layers", "peers", "means"),
    [
        (["first", "second"], 2, [1.0, 2.0]),  # as it was saved: what this process has seen itself
        (["first", "second"], 1, [30.0, 30.0]),  # two stages without a replica, in place of one with
        (["first", "second"], 0, [30.0, 30.0]),
        (["first"], 2, [30.0]),  # other stages, replicas as well
        (["second", "third"], 2, [30.0, 30.0]),
        (["third"], 0, [30.0]),
    ],
)
def test_own_statistics_come_back_only_where_the_layout_is_the_same(
    layers: list[str], peers: int, means: list[float], cache: Path
) -> None:
    settings = Data(name="digits", cache=str(cache))
    images, _ = load_train_test(prepare.prepare_dataset(settings), settings)
    cpu = torch.device("cpu")

    def training(names: list[str], size: int) -> TrainState:
        part = nn.Sequential(OrderedDict((name, nn.BatchNorm1d(1)) for name in names))
        many = World(size=size, hosts=("here",) * size, device=cpu, backend="gloo", threads=1) if size else None
        loader = data.Loader(images, 8, 0, cpu, torch.float32)
        return TrainState([part], torch.optim.SGD(part.parameters()), loader, peers=Ranks(many) if many else None)

    saved = training(["first", "second"], 1)
    for number, (_, buffer) in enumerate(pair for pair in saved.buffers if pair[0].endswith("mean")):
        buffer.fill_(number + 1)
    whole = training(["first", "second", "third"], 0).collect_state().model
    averaged = {name: torch.full_like(value, 30) if name.endswith("mean") else value for name, value in whole.items()}
    common, local = saved.collect_state().common, saved.collect_state().local
    resumed = training(layers, peers)
    resumed.load(LoadedCheckpoint(5, 1, 4, averaged, {}, common, local))
    assert [buffer.item() for name, buffer in resumed.buffers if name.endswith("mean")] == means


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["replicas=3"], ["batch=64", "replicas=3", "1, 2, 4"]),
        (["replicas=2", "launch.nodes=4"], ["replicas=2", "launch.nodes=4", "multiple of launch.nodes"]),
        (["replicas=2", "split_size=64"], ["split_size=64", "batch=32"]),
        (["replicas=2", "devices=[cpu,cpu]"], ["needs a single process"]),
    ],
)
def test_replicas_that_do_not_fit_are_refused(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load_config(Config, words, {})
    assert all(part in str(caught.value) for part in parts), caught.value
    assert config.load_config(Config, ["replicas=4", "launch.nodes=2"], {}).processes == 8


def test_what_does_not_fit_into_one_process_trains_in_two(tmp_path: Path) -> None:
    """11 million parameters with gradients and Adam's memory take 180 MB, and a step some more; half of them fit."""
    small = ("data.name=generated", "data.samples=50", "data.image_size=16", "batch=4", "steps=1", "plot=false")
    tight = (f"data.cache={tmp_path}", "optim.name=adam", "balance=parameters", "memory_cap=210", "launch.threads=1")
    whole = run("resnet_modelparallel", *small, *tight, "mode=single", runs=tmp_path / "one")
    assert whole.status == 2 and "Traceback" not in whole.err
    assert whole.folder.result["cause"] == "out_of_memory"
    (line,) = [line for line in whole.err.splitlines() if "error" in line]
    assert "memory_cap=210" in line and "does not fit into 210 MB" in line and "stages=" in line
    split = run("resnet_modelparallel", *small, *tight, "mode=pipelined", "stages=2", runs=tmp_path / "two")
    assert split.status == 0, split.err
    assert len(split.losses) == 1
    assert 0.4 * 180e6 < split.result["training_bytes"] < 210e6 < min(split.result["memory"].values()), split.result
    number = r"rank 0: [\d.]+ MB  rank 1: [\d.]+ MB  of "
    assert re.search(rf"peak memory +{number}the whole process, libraries included", split.out), split.out
    assert re.search(rf"training memory +{number}writable .*; the limit is memory_cap=210", split.out), split.out
