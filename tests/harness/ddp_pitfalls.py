"""Mistakes of data parallelism, made by two real processes with short time-outs, for tests/pitfalls/.

python -m tests.harness.ddp_pitfalls NAME ...      prints what each process found, as JSON, by name
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.models.networks import SimpleNN
from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from common.techniques.data_parallel import ddp
from configs.ddp_multinode import Config
from configs.shared import Launch
from experiments import ddp_multinode
from tests.harness import warm
from tests.harness.processes import environment

SECONDS = 2.0


def attempt(work: Callable[[], Any]) -> Any:
    """What it returns, or its error and how long that took."""
    start = time.monotonic()
    try:
        return work()
    except Exception as error:
        return {"error": str(error), "seconds": time.monotonic() - start}


def on_world(world: World) -> Any:
    """What the experiment asks a run for when it wraps a model."""

    def ignore(*_: Any) -> None:
        """The model is not trained by a run."""

    return SimpleNamespace(world=world, device=world.device, add_hook=ignore, add_local_part=ignore)


def in_ranks(size: int, work: Callable[[World], Any], seconds: float = SECONDS) -> list[Any]:
    """What each of some ranks finds; `seconds` is the time limit of a collective."""
    folder = Path(tempfile.mkdtemp())
    files = [folder / str(rank) for rank in range(size)]

    def body(place: RankInfo) -> None:
        with rendezvous.join_world(place, Launch(device="cpu", threads=1, step_timeout=seconds)) as world:
            dist.barrier()  # a rank that leaves at once would fail the others, which may still connect to it
            files[place.rank].write_text(json.dumps(attempt(lambda: work(world))))
            if world.is_main:  # it keeps the meeting place alive until the others have found out too
                deadline = time.monotonic() + 3 * seconds
                while not all(file.exists() for file in files) and time.monotonic() < deadline:
                    time.sleep(0.01)

    assert local_launcher.run_ranks(body, size, 1, lambda: None) == 0
    return [json.loads(file.read_text()) for file in files]


def in_two(work: Callable[[World], Any]) -> list[Any]:
    """What each of two ranks finds."""
    return in_ranks(2, work)


def ranks_in_a_loop() -> Any:
    """The mistake: `for rank in range(2): train(rank)`."""
    file, began = Path(tempfile.mkdtemp()) / "store", []

    def train(rank: int) -> None:
        began.append(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = datetime.timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", store=dist.FileStore(str(file), 2), rank=rank, world_size=2, timeout=limit)

    def loop() -> None:
        for rank in range(2):
            train(rank)

    return {"together": in_two(lambda world: world.size), "loop": attempt(loop), "began": began}


def group_in_a_function_that_returns() -> Any:
    """The mistake: the group is set up by processes that end with it, and used afterwards, elsewhere."""
    inside = in_two(lambda world: dist.is_initialized())
    return {"inside": inside, "after": dist.is_initialized(), "use": attempt(lambda: dist.all_reduce(torch.ones(1)))}


def barrier_on_one_rank() -> Any:
    def work(world: World, everybody: bool) -> float:
        if everybody or world.is_main:
            dist.barrier()
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    return {"one": in_two(lambda world: work(world, False)), "all": in_two(lambda world: work(world, True))}


def several_devices() -> Any:
    def work(world: World) -> Any:
        wrong = attempt(lambda: DistributedDataParallel(SimpleNN(), device_ids=[0, 1]))
        right = ddp_multinode.wrap_model(Config(), SimpleNN(), on_world(world))
        return [wrong, type(right).__name__]

    return in_two(work)


def model_parallelism() -> Any:
    """How many parameters a process holds."""

    def held(world: World, strategy: Any) -> int:
        model = ddp_multinode.wrap_model(Config(strategy=strategy), SimpleNN(), on_world(world))
        locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        return sum(p.numel() for p in locals_)

    return in_two(lambda world: [held(world, "ddp"), held(world, "fsdp")])


def own_statistics() -> Any:
    """Whether BatchNorm under ddp keeps the statistics of a process's own samples, as a model without ddp has them."""

    def work(world: World) -> bool:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        alone = copy.deepcopy(inner)
        model = ddp.wrap_ddp(inner, world.device)
        for step in range(3):
            torch.manual_seed(10 * step + world.rank)
            x = torch.randn(5, 3, 4, 4)
            model(x).sum().backward()
            alone(x)
        return all(torch.equal(a, b) for a, b in zip(inner.buffers(), alone.buffers(), strict=True))

    return in_two(work)


def torchs_norm() -> Any:
    return in_two(lambda world: attempt(lambda: nn.SyncBatchNorm(3)(torch.randn(2, 3, 4, 4)).sum().item()))


def made(*names: str, module: str = "ddp_pitfalls", **variables: str) -> dict[str, Any]:
    """What processes find when they make mistakes of a module of tests/harness."""
    words = [sys.executable, "-m", f"tests.harness.{module}", *names]
    done = warm.execute(words, env=environment(**variables), timeout=250)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
