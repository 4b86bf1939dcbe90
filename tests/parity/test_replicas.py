"""Replicas of a pipeline equal the unsplit model, and a model too large for one process trains in two."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from common import config, data, prepare, seeds
from common.checkpoint import Loaded
from common.config import UserError
from common.launch import World
from common.models import ResNet
from common.training import Training
from configs.resnet_modelparallel import Config
from configs.shared import Data
from experiments.resnet_modelparallel import Team
from tests.harness.ddp_parity import KEEP
from tests.harness.parity import differences, normalised, scored
from tests.harness.processes import Done, run

STEPS, BATCH, PIECE = 10, 8, 2
SET = ("data.name=generated", "data.samples=50", "data.image_size=32")  # six steps an epoch, two samples left out
PARITY = (
    *SET,
    f"batch={BATCH}",
    f"steps={STEPS}",
    "epochs=2",
    "dtype=float64",
    "eval_batch=4",
    "plot=false",
)
SAVED = (f"checkpoint.every_steps={STEPS}", "checkpoint.every_seconds=0", "stages=2", "split=[layer3_0]")


def reference(cache: Path) -> dict[str, Any]:
    """A bare loop: two shares of each batch in microbatches, each share with BatchNorm buffers of its own.

    These are averaged for the evaluation after each epoch, and training goes on with the means.
    """
    settings = Data(name="generated", samples=50, image_size=32, cache=str(cache))
    prepared = prepare.prepare(settings)
    images, labels = normalised(prepared, "train")
    torch.manual_seed(seeds.derive(0, "init"))
    model = ResNet("resnet18", (3, 32, 32), 10).double().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    buffers = [{name: b.clone() for name, b in model.named_buffers()} for _ in range(2)]
    losses = []
    for step in range(STEPS):
        epoch, position = divmod(step, 6)
        rows = torch.from_numpy(data.order(50, 0, epoch))[position * BATCH :][:BATCH]
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / STEPS)
        optimizer.zero_grad()
        total = 0.0
        for share, own in zip(rows.chunk(2), buffers, strict=True):
            for piece in share.split(PIECE):
                loss = F.cross_entropy(functional_call(model, own, (images[piece],)), labels[piece]) * PIECE / BATCH
                loss.backward()
                total += loss.item()
        optimizer.step()
        losses.append(total)
        if step in (5, STEPS - 1):
            for name in buffers[0]:
                if buffers[0][name].is_floating_point():
                    buffers[0][name] = (buffers[0][name] + buffers[1][name]) / 2
                    buffers[1][name] = buffers[0][name].clone()
    model.load_state_dict(dict(model.named_parameters()) | buffers[0])
    scores = scored(model, *normalised(prepared, "test"))
    return {"losses": losses, "state": model.state_dict(), "scores": scores}


def found(done: Done) -> dict[str, Any]:
    """Losses, what all ranks saved, and scores."""
    assert done.status == 0, done.err + done.out
    folder = done.folder.attempts()[0].attempt / "checkpoints" / f"step-{STEPS:08d}"
    state: dict[str, Any] = {}
    for file in sorted(folder.glob("rank-*.pt")):
        state |= torch.load(file, weights_only=True)["model"]
    names = ("test_loss", "test_accuracy", "test_samples")
    return {"losses": done.losses, "state": state, "scores": {name: done.folder.result[name] for name in names}}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    cache = tmp_path_factory.mktemp("sets")
    return cache, reference(cache)


@pytest.mark.parametrize(
    "words",
    [
        ("mode=pipelined", "schedule=1f1b"),
        ("mode=pipelined", "schedule=gpipe", "launch.nodes=2"),
        ("mode=pipelined", "engine=torch", "schedule=gpipe"),
        ("mode=naive", "transport=network"),
    ],
    ids=" ".join,
)
def test_two_replicas_of_two_stages_equal_one_process(
    words: tuple[str, ...], expected: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    cache, right = expected
    common = (f"data.cache={cache}", "replicas=2", f"split_size={PIECE}", "launch.threads=1", *words)
    done = run("resnet_modelparallel", *PARITY, *SAVED, *common, runs=tmp_path, **KEEP)
    assert differences(found(done), right) == []
    assert len(list(done.folder.attempts()[0].attempt.glob("heartbeat-*.json"))) == 4


def test_stages_share_a_host_and_replicas_have_one_each() -> None:
    cfg = config.load(Config, ["replicas=2", "stages=3", "launch.nodes=2"], {})

    class Somewhere(SimpleNamespace):
        """A process of six, with the host of each."""

        def part(self, members: Sequence[int]) -> Any:
            return SimpleNamespace(members=[*members], hosts=[self.hosts[member] for member in members])

    blocks = [Team.of(cfg, cast(Any, Somewhere(rank=rank, size=6, hosts="aaabbb"))) for rank in range(6)]
    assert [cast(Any, team.pipeline).members for team in blocks] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert [cast(Any, team.peers).members for team in blocks] == [[0, 3], [1, 4], [2, 5]] * 2
    for rank, hosts in itertools.product(range(6), ("ababab", "aaaabb")):  # all say it: none waits for the others
        with pytest.raises(UserError, match="replicas=2: a replica's stages are on a and b; start a multiple of 3"):
            Team.of(cfg, cast(Any, Somewhere(rank=rank, size=6, hosts=hosts)))


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
    images, _ = data.load(prepare.prepare(settings), settings)
    cpu = torch.device("cpu")

    def training(names: list[str], size: int) -> Training:
        part = nn.Sequential(OrderedDict((name, nn.BatchNorm1d(1)) for name in names))
        many = World(0, size, 0, size, 0, 1, "local", ("here",) * size, cpu, "gloo", 1) if size else None
        loader = data.Loader(images, 8, 0, cpu, torch.float32)
        return Training([part], torch.optim.SGD(part.parameters()), loader, cast(World, None), peers=many)

    saved = training(["first", "second"], 1)
    for number, (_, buffer) in enumerate(pair for pair in saved.buffers if pair[0].endswith("mean")):
        buffer.fill_(number + 1)
    whole = training(["first", "second", "third"], 0).state().model
    averaged = {name: torch.full_like(value, 30) if name.endswith("mean") else value for name, value in whole.items()}
    common, local = saved.state().common, saved.state().local
    resumed = training(layers, peers)
    resumed.load(Loaded(5, 1, 4, averaged, {}, common, local))
    assert [buffer.item() for name, buffer in resumed.buffers if name.endswith("mean")] == means


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["replicas=3"], ["batch=64", "replicas=3", "1, 2, 4"]),
        (["replicas=2", "launch.nodes=4"], ["replicas=2", "launch.nodes=4", "multiple of the nodes"]),
        (["replicas=2", "split_size=64"], ["split_size=64", "batch=32"]),
        (["replicas=2", "devices=[cpu,cpu]"], ["belong to one process"]),
    ],
)
def test_replicas_that_do_not_fit_are_refused(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load(Config, words, {})
    assert all(part in str(caught.value) for part in parts), caught.value
    assert config.load(Config, ["replicas=4", "launch.nodes=2"], {}).processes == 8


def test_what_does_not_fit_into_one_process_trains_in_two(tmp_path: Path) -> None:
    """11 million parameters with gradients and Adam's memory take 180 MB, and a step some more; half of them fit."""
    small = ("data.name=generated", "data.samples=50", "data.image_size=16", "batch=4", "steps=3", "plot=false")
    tight = (f"data.cache={tmp_path}", "optim.name=adam", "balance=parameters", "memory_cap=210", "launch.threads=1")
    whole = run("resnet_modelparallel", *small, *tight, "mode=single", runs=tmp_path / "one")
    assert whole.status == 2 and "Traceback" not in whole.err
    (line,) = [line for line in whole.err.splitlines() if "error" in line]
    assert "memory_cap=210" in line and "does not fit into 210 MB" in line and "stages=" in line
    split = run("resnet_modelparallel", *small, *tight, "mode=pipelined", "stages=2", runs=tmp_path / "two")
    assert split.status == 0, split.err
    assert len(split.losses) == 3
    free = run("resnet_modelparallel", *small, *tight[:-2], "mode=single", "memory_cap=0", runs=tmp_path / "free")
    assert free.status == 0, "the limit was what was in the way"
