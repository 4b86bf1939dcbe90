"""Data parallelism around the method: shares, settings and reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from common.config import config
from common.data import loader as data
from common.data import prepare
from common.measure import step_timing
from common.measure.step_timing import RankTimes
from common.models import networks
from common.system.errors import UserError
from common.techniques.data_parallel import sync_batchnorm
from common.techniques.data_parallel.scaling_report import ScalingReport
from common.training.evaluate import slice_shard
from configs.ddp_multinode import Config
from tests.harness.ddp_pitfalls import made
from tests.harness.processes import run


@pytest.mark.parametrize(("count", "size", "ranks"), [(101, 16, 2), (101, 16, 4), (9, 4, 2), (1, 10, 3), (64, 64, 1)])
def test_shares_cover_every_sample_once_in_equally_many_slices(count: int, size: int, ranks: int) -> None:
    slices = [list(slice_shard(count, size, rank, ranks)) for rank in range(ranks)]
    assert len({len(mine) for mine in slices}) == 1
    assert sorted(i for mine in slices for s in mine for i in range(s.start, s.stop)) == list(range(count))
    lengths = [s.stop - s.start for mine in slices for s in mine]
    assert max(lengths) <= size and max(lengths) - min(lengths) <= 1


def test_shares_of_a_batch_are_the_batch(cache: Path) -> None:
    images = data.Images(prepare.prepare_digits(cache), "train", limit=200)

    def loader(share: tuple[int, int]) -> data.Loader:
        return data.Loader(images, 24, 3, torch.device("cpu"), torch.float32, block=3, shard=share)

    whole = [(x, y) for x, y in loader((0, 1))]
    parts = [[(x, y) for x, y in loader((rank, 4))] for rank in range(4)]
    assert len(whole) == 8
    for step, (x, y) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), x)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), y)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["batch=63"], ["batch=63", "2 ranks", "batch=62 or 64", "processes_per_node=1"]),
        (["batch=64", "processes_per_node=5"], ["batch=60 or 65", "processes_per_node=4"]),
        (["sync_batchnorm=true"], ["model=convnet has none", "model=resnet18"]),
        (["strategy=fsdp", "communication=fp16"], ["communication applies to DDP only", "strategy=ddp"]),
        (["strategy=fsdp", "static_graph=true"], ["static_graph applies to DDP only"]),
        (["powersgd_rank=4"], ["powersgd_rank=4 needs communication=powersgd"]),
        (["data.name=generated", "data.samples=50"], ["batch=64 exceeds the 50 training samples"]),
        (["data.name=cifar10", "batch=50002"], ["exceeds the 50000 training samples"]),
        (["shards=[2,1,1]"], ["shards=[2,1,1] has length 3, but there are 2 ranks", "such as [3,1]"]),
        (["shards=3"], ["shards=[3] has length 1, but there are 2 ranks", "such as [3,1]"]),
        (["shards=[3,-1]"], ["shards=[3,-1] must be equal, auto, or one integer >= 0 per rank"]),
        (["shards=[3,0.5]"], ["shards=[3,0.5] must be equal, auto, or one integer >= 0 per rank"]),
        (["shards=[]"], ["shards=[] must be equal, auto, or one integer"]),
        (["shards=auto", "batch=4", "processes_per_node=5"], ["one sample per rank", "set batch to at least 5"]),
        (["elastic=true", "strategy=fsdp"], ["losing a rank would lose part of the state", "omit strategy=fsdp"]),
        (["elastic=true", "processes_per_node=1"], ["requires at least two ranks", "processes_per_node=2"]),
        (["shards=auto", "strategy=fsdp"], ["shards=auto", "strategy=fsdp", "such as shards=[3,1]"]),
        (["shards=auto", "model=resnet18", "sync_batchnorm=true"], ["shards=auto", "omit sync_batchnorm=true"]),
        (["launch.mixed=true", "strategy=fsdp"], ["launch.mixed=true", "use strategy=ddp"]),
        (["launch.mixed=true", "launch.device=cpu"], ["launch.mixed=true", "omit launch.device=cpu"]),
        (["launch.mixed=true", "launch.backend=builtin"], ["launch.mixed=true", "omit launch.backend=builtin"]),
        (["shards=[0,0]"], ["shards=[0,0] assigns no samples to any rank", "at least one weight"]),
    ],
)
def test_settings_of_data_parallelism_that_do_not_fit_are_refused(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load_config(Config, words, {})
    assert all(part in str(caught.value) for part in parts), caught.value


def test_data_parallel_processes_follow_from_the_nodes() -> None:
    assert config.load_config(Config, [], {}).processes == 2
    assert config.load_config(Config, ["launch.nodes=4"], {}).processes == 4
    assert config.load_config(Config, ["launch.nodes=2", "processes_per_node=8"], {}).processes == 16


def test_resnet_is_torchvisions_with_another_stem() -> None:
    torchvision = pytest.importorskip("torchvision")
    theirs = torchvision.models.resnet18(num_classes=10)
    theirs.conv1, theirs.maxpool = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.Identity()
    ours = networks.build_network("resnet18", (3, 32, 32), 10)
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert mine.shape == other.shape
        mine.copy_(other)
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)
    assert networks.ConvNet((28, 28), 10).state_dict()["fc1.weight"].shape == (100, 64 * 12 * 12)


def test_each_process_keeps_its_own_statistics() -> None:
    assert made("own_statistics")["own_statistics"] == [True, True]


def test_torchs_own_synchronised_norm_refuses_the_cpu() -> None:
    assert all("GPU" in answer["error"] for answer in made("torchs_norm")["torchs_norm"])
    plain, other = (networks.ResNet("resnet18", (3, 32, 32), 10, width=8) for _ in range(2))
    ours = sync_batchnorm.convert_sync_batchnorm(other, torch.device("cpu"))
    assert ours.state_dict().keys() == plain.state_dict().keys()
    assert sum(isinstance(module, sync_batchnorm.SyncBatchNorm2d) for module in ours.modules()) == 20


def rank(number: int, before: float, exposed: tuple[float, ...] = ()) -> RankTimes:
    return RankTimes(data=0.001, before_backward=before, step=0.1, steps=50, rank=number, exposed=exposed)


def test_the_report_names_the_straggler_and_what_is_not_hidden() -> None:
    ranks = [rank(0, 0.010, (0.5, 0.2, 0.9)), rank(1, 0.020, (0.1, 0.3, 0.2)), rank(2, 0.011, (0.6, 0.2, 0.4))]
    found = ScalingReport(ranks, ("a", "b", "c"), communication_seconds=0.4, single_rank_seconds=0.15, step_seconds=0.1)
    assert found.straggler == 1 and "rank 1 on b: 20.00 ms" in found.rows()["straggler"]
    assert found.exposed_fraction == pytest.approx(0.2 / 0.4)  # the median of 0.1, 0.2, 0.2
    assert found.efficiency == pytest.approx(0.15 / 0.1 / 3) and "50%" in found.rows()["efficiency"]
    assert ScalingReport([rank(0, 0.010), rank(1, 0.011)], ("a", "b"), 0.1).straggler is None
    more = [replace(each, samples=count) for each, count in zip(ranks, (32, 64, 32), strict=True)]
    assert ScalingReport(more, ("a", "b", "c"), 0.1).straggler is None, "rank 1 has twice as many samples"
    of_two = ScalingReport([rank(1, 0.010), rank(2, 0.020)], ("a", "b", "c"), 0.1)  # rank 0 has just joined
    assert of_two.straggler == 2 and "rank 2 on c: 20.00 ms" in of_two.rows()["straggler"]
    assert ScalingReport(ranks[:1], "a", 0.1).rows().keys() == {"ms per step"}


def test_how_a_process_does_is_told_from_enough_steps_on() -> None:
    times = step_timing.StepTimer(nn.Linear(1, 1), torch.device("cpu"))
    for _ in times.iterate_batches(range(step_timing.WARM_UP + step_timing.MIN_STEPS)):
        times.record_mark("backward")
        assert times.estimate_seconds_to_backward() is None
    assert times.estimate_seconds_to_backward() is not None


def test_fsdp_shows_the_state_that_a_rank_holds_beside_that_of_ddp(tmp_path: Path, digits: tuple[str, ...]) -> None:
    words = ("strategy=fsdp", "optim.name=adam", "batch=16", "steps=1", "log.progress=bar")
    done = run("ddp_multinode", *digits, *words, runs=tmp_path)
    assert done.status == 0, done.err
    assert "1/1" in done.out and "samples/s" not in done.out, "no speed is shown before there is one"
    bytes = 4 * sum(parameter.numel() for parameter in networks.ConvNet((28, 28), 10).parameters())
    held, whole = done.result["state_bytes"], done.result["unsharded_state_bytes"]
    assert whole == pytest.approx(4 * bytes, rel=1e-4)  # Adam keeps two numbers a parameter, and counts steps
    for kind, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        assert sum(held[kind]) == pytest.approx(times * bytes, rel=1e-4), kind
        assert max(held[kind]) == pytest.approx(times * bytes / 2, rel=0.01), kind
    each = f"{whole / 2e6:.1f} MB"
    told = f"rank 0: {each}  rank 1: {each}  of parameters, gradients and optimizer state; "
    told += f"strategy=ddp would need {whole / 1e6:.1f} MB per rank"
    assert told in done.out and "of the whole process, libraries included" in done.out, done.out


def test_ddp_multinode_reports_its_efficiency_if_asked(tmp_path: Path, digits: tuple[str, ...]) -> None:
    done = run("ddp_multinode", *digits, "batch=16", "compare=true", runs=tmp_path)
    assert done.status == 0, done.err
    result = done.result
    assert 0 < result["efficiency"] < 4 and 0 < result["communication_exposed"] <= 1
    assert "efficiency" in done.out and len(result["ranks"]) == 2 and "strategy=ddp would need" not in done.out


# ---- data
